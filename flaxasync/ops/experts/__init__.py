"""A mixture of experts whose tokens travel while experts multiply."""

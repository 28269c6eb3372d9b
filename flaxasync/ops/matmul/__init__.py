"""Collective matmuls: matrix products whose operands or results are spread over the devices of one
mesh axis.
"""

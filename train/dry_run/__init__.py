"""What a step would need and how fast it would be, on chips that are not there."""

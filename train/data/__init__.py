"""The training data: sources of tokens, batches, and what identifies them."""

"""Attention layers: `layer` and `self_attention` are what users build, on `base`, `heads`,
`exchange`, `rotary`.
"""

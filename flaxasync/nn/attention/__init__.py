"""Attention layers: `layer` and `self_attention` split heads over a mesh axis, `ring` splits the sequence alone."""

"""Attention and transformers as RNNs, one token at a time."""

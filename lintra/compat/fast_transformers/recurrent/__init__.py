"""The same models as RNNs, one token at a time."""

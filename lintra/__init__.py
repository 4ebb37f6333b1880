"""Transformers with linear attention: train in parallel, generate as an RNN from the same weights."""

__version__ = "0.1.0"

"""Inputs of layers."""

import torch


def draw(b=2, t=9):
    return torch.randn(b, t, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

"""Layers around a mechanism."""

from lintra.legacy import renamed_attribute
from lintra.nn.attention_layer import AttentionLayer
from lintra.nn.block import Block
from lintra.nn.distributions import LogisticMixture, Logits
from lintra.nn.mask import lengths_to_mask
from lintra.nn.mlp import MLP
from lintra.nn.multihead_attention import MultiheadAttention
from lintra.nn.position import Learned, Sinusoidal
from lintra.nn.real_distributions import Gaussian, Quantiles, StudentT

__getattr__ = renamed_attribute(__name__, {"Heads": AttentionLayer, "Feed": MLP})

__all__ = [
    "MLP",
    "AttentionLayer",
    "Block",
    "Gaussian",
    "Learned",
    "LogisticMixture",
    "Logits",
    "MultiheadAttention",
    "Quantiles",
    "Sinusoidal",
    "StudentT",
    "lengths_to_mask",
]

"""The mechanisms. One file, one paper, one mechanism: the folder is the registry."""

from lintra.attention._feature_maps import FeatureMap
from lintra.attention._kernel import KernelAttention
from lintra.attention._registry import broken, describe, for_length, load, mechanism, name_of, names
from lintra.attention._scores import ScoredAttention, TokenMemory
from lintra.attention._training import no_weight_decay, redraw
from lintra.attention.base import Attention, AttentionConfig, AttentionPattern, Capabilities, in_layer
from lintra.ops.state import State, leaves, map_state

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionPattern",
    "Capabilities",
    "FeatureMap",
    "KernelAttention",
    "ScoredAttention",
    "State",
    "TokenMemory",
    "broken",
    "describe",
    "for_length",
    "in_layer",
    "leaves",
    "load",
    "map_state",
    "mechanism",
    "name_of",
    "names",
    "no_weight_decay",
    "redraw",
]

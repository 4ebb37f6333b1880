"""Pure functions of tensors: no parameters, no configuration, no memory between calls.

Each op has a reference beside it, a short and slow definition in plain PyTorch against which it is tested.
"""

from lintra.ops.banded import banded_attention, banded_attention_reference
from lintra.ops.blocks import block_attention, block_attention_reference
from lintra.ops.conv1d import causal_conv1d, causal_conv1d_reference
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import (
    LinearState,
    linear_attention,
    linear_attention_reference,
    recurrence_reference,
)
from lintra.ops.lsh import lsh_attention, lsh_attention_reference
from lintra.ops.renamed import delta_rule, gated_attention
from lintra.ops.rope import RotaryEmbedding
from lintra.ops.segments import segment_attention, segment_attention_reference
from lintra.ops.selective_scan import selective_scan, selective_scan_reference
from lintra.ops.softmax_attention import PartialAttention, merge_lse, softmax_attention

__all__ = [
    "Layout",
    "LinearState",
    "PartialAttention",
    "RotaryEmbedding",
    "banded_attention",
    "banded_attention_reference",
    "block_attention",
    "block_attention_reference",
    "causal_conv1d",
    "causal_conv1d_reference",
    "delta_rule",
    "gated_attention",
    "linear_attention",
    "linear_attention_reference",
    "lsh_attention",
    "lsh_attention_reference",
    "merge_lse",
    "recurrence_reference",
    "segment_attention",
    "segment_attention_reference",
    "selective_scan",
    "selective_scan_reference",
    "softmax_attention",
]

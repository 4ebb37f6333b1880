"""Pure functions of tensors: no parameters, no configuration, nothing remembered."""

from lintra.ops.linear_attention import LinearState, linear_attention

__all__ = ["LinearState", "linear_attention"]

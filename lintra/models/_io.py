"""The two ends of a network that reads a whole sequence: tokens or features in, predictions out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lintra.config import fields
from lintra.nn.embedding import TokenEmbedding
from lintra.nn.parameters import check_dtype
from lintra.ops import checks
from lintra.ops.layout import CuSeqlens, Layout
from lintra.ops.padding import last_real, take

Pool = Literal["mean", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class EncoderIOConfig:
    """Inputs and outputs of an encoder."""

    vocabulary: int | None = None  # n: it reads the symbols 0 .. n-1; or
    inputs: int | None = None  # numbers a time step: it reads continuous features
    outputs: int | None = None  # numbers in a prediction, such as classes; None: the hidden ones as they are
    pool: Pool | None = None  # one prediction a sequence, of its mean, first or last token; None: one a token

    def __post_init__(self):
        fields.check(self)
        if (self.vocabulary is None) == (self.inputs is None):
            raise ValueError(
                "an encoder reads symbols or features: one of vocabulary and inputs must be given, got "
                f"{self.vocabulary} and {self.inputs}"
            )
        fields.at_least(self, vocabulary=1, inputs=1, outputs=1)

    def check_hidden(self) -> None:
        """Raise ValueError unless it leaves its hidden vectors as they are, for another network to read."""
        if self.outputs is not None or self.pool is not None:
            raise ValueError(
                "the encoder's hidden vectors are read, so it needs outputs=None and pool=None, got "
                f"{self.outputs} and {self.pool!r}"
            )


def input_embedding(config: EncoderIOConfig, width: int) -> nn.Module:
    """Return the layer that embeds tokens, or projects features, to `width`."""
    if config.vocabulary is not None:
        return TokenEmbedding(config.vocabulary, width, start=False)
    assert config.inputs is not None
    return nn.Linear(config.inputs, width)


def validate_input(config: EncoderIOConfig, reader: nn.Module, x: Tensor, layout: Layout) -> Tensor:
    """Return the tokens [b t] or features [b t i] of an encoder with 0 in padded places.

    Raises ValueError or TypeError unless x fits the configuration and the weights of `reader`, the layer it
    goes into.
    """
    if config.inputs is not None:
        check_dtype("x", x, reader)
        return layout.zero(x)
    assert config.vocabulary is not None
    x = layout.zero(x)
    checks.symbols("tokens", x, config.vocabulary - 1)
    return x


def input_layout(
    config: EncoderIOConfig, x: Tensor, mask: Tensor | None, cu_seqlens: CuSeqlens | None
) -> Layout:
    """Return the layout of what an encoder reads.

    Raises ValueError or TypeError unless x is tokens [b t] or features [b t i], as configured, and mask or
    cu_seqlens go with it."""
    if config.inputs is not None:
        checks.activations(x, config.inputs)
    else:
        check_tokens(x)
    return Layout.of("x", x, mask, cu_seqlens)


def build_head(config: EncoderIOConfig, width: int) -> nn.Module:
    """Build the layer from hidden vectors of this width to predictions."""
    return nn.Identity() if config.outputs is None else nn.Linear(width, config.outputs)


def predict(pool: Pool | None, head: nn.Module, hidden: Tensor, layout: Layout) -> Tensor:
    """Return one prediction a sequence [b o], of packed ones [n o], or a token [b t o], 0 where it is padded.

    hidden [b t c] is 0 in padded places. A sequence without a real token is predicted from zeros.
    """
    if pool is None:
        return layout.zero(head(hidden))
    if layout.packed:
        padded = layout.pad_all()
        return predict(pool, head, padded.unpack(hidden)[0], padded.layouts[0])
    if pool == "first":
        left = layout.left_align()
        return head((hidden if left is None else left.gather(hidden))[:, :1].sum(1))
    mask = layout.mask
    if pool == "last":
        if mask is None or not mask.shape[1]:
            return head(hidden[:, -1:].sum(1))
        return head(take(hidden, last_real(mask)[:, None])[:, 0])
    count = max(1, hidden.shape[1]) if mask is None else mask.sum(1, keepdim=True).clamp(min=1)
    total = hidden.sum(1, dtype=checks.sum_dtype(hidden.dtype))  # a sum of many may be beyond float16
    return head((total / count).to(hidden.dtype))


def check_tokens(tokens: Tensor) -> None:
    """Raise ValueError or TypeError unless tokens are integers [b t]."""
    checks.shape("tokens", tokens, "b t", {})
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens must be int64 or int32, got {tokens.dtype}")

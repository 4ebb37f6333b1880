"""Base of the types of linear attention: a feature map and the sum."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lintra import ops
from lintra.compat.fast_transformers._inner import EVENTS, Dispatching, InnerAttention, Real
from lintra.compat.fast_transformers.attention_registry import Callable as CallableSpec
from lintra.compat.fast_transformers.attention_registry import Int, Optional, Spec
from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.feature_maps import Favor, elu_feature_map
from lintra.compat.fast_transformers.feature_maps.fourier_features import begin
from lintra.ops.features import apply_feature_map
from lintra.ops.padding import zero_padding

FEATURES: list[tuple[str, Spec]] = [
    ("query_dimensions", Int),
    ("feature_map", Optional(CallableSpec)),
    *EVENTS,
]


class Features(Dispatching):
    """Base: `feature_map(query_dimensions)`, by default elu + 1; `eps` is added to the denominator.

    `_past_only` (causal): raises ValueError for a map whose features of one token depend on the others.
    """

    _past_only: ClassVar[bool] = False

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], nn.Module] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(event_dispatcher)
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        self.eps = eps
        if self._past_only and isinstance(self.feature_map, Favor) and self.feature_map.stabilize:
            raise ValueError(
                "Favor(stabilize=True) subtracts the maximum of the whole sequence, which a causal model "
                "must not know: use stabilize=False, or lintra.attention.performer, whose running maximum is "
                "exact"
            )


class FeatureAttention(Features, InnerAttention):
    """Base of the two types of whole sequences."""

    def _sum(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        begin(self.feature_map, q.device)
        if getattr(self.feature_map, "stabilize", False):  # by the largest exponent of a sequence
            q, k = _first_in_padding(q, real.q), _first_in_padding(k, real.k)
        q, k, fused = features(self.feature_map, q, k)
        options, mask = {"causal": self._past_only, "eps": self.eps}, real.k
        if self._past_only and mask is not None and mask is not real.q:
            # The causal sum gives 0 where its mask does, and the query at a padded key may be real.
            q, k, fused = apply_feature_map(fused, q), apply_feature_map(fused, k), None
            k, mask = zero_padding(mask, k)[0], None
        return ops.linear_attention(q, k, v, mask=mask, feature_map=fused, **options)[0]


def _first_in_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [n l h d] with the first token of each sample in its padded places."""
    if mask is None:
        return x
    first = mask.int().argmax(1)[:, None, None, None].expand(-1, 1, *x.shape[2:])
    return torch.where(mask[..., None, None], x, x.gather(1, first))


def features(feature_map: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return the inputs of the sum, and the name of the map that it still has to apply."""
    fused = getattr(feature_map, "fused", None)
    if fused is not None:
        return q, k, fused
    queries, keys = (getattr(feature_map, f"forward_{x}", feature_map) for x in ("queries", "keys"))
    return queries(q), keys(k), None

"""What the types of linear attention share: a feature map and the sum."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lintra import ops
from lintra.compat.fast_transformers._inner import EVENTS, Dispatching, InnerAttention
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
    """Base: `feature_map(query_dimensions)`, by default elu + 1; `eps` is added to the denominator."""

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


class FeatureAttention(Features, InnerAttention):
    """Base of the two types of whole sequences."""

    def _sum(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real_q: Tensor | None,
        real_k: Tensor | None,
        *,
        causal: bool,
    ) -> Tensor:
        begin(self.feature_map, q.device)
        q, k, fused = features(self.feature_map, q, k)
        if causal and real_k is not None and real_k is not real_q:
            # The causal sum gives 0 where its mask does, and beside a padded key a query may be real.
            q, k, fused = apply_feature_map(fused, q), apply_feature_map(fused, k), None
            k, real_k = zero_padding(real_k, k)[0], None
        return ops.linear_attention(q, k, v, mask=real_k, causal=causal, eps=self.eps, feature_map=fused)[0]


def features(feature_map: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return what goes into the sum, and the name of the map that is left for it to apply."""
    fused = getattr(feature_map, "fused", None)
    if fused is not None:
        return q, k, fused
    queries, keys = (getattr(feature_map, f"forward_{x}", feature_map) for x in ("queries", "keys"))
    return queries(q), keys(k), None


def by_position_only(feature_map: nn.Module) -> None:
    """Raises ValueError for a map whose features of one token depend on the others."""
    if isinstance(feature_map, Favor) and feature_map.stabilize:
        raise ValueError(
            "Favor(stabilize=True) subtracts the maximum of the whole sequence, which a causal model must "
            "not know: use stabilize=False, or lintra.attention.performer, whose running maximum is exact"
        )

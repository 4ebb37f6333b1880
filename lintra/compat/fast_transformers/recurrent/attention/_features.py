"""What the two types of linear attention share: a feature map."""

from collections.abc import Callable

from torch import nn

from lintra.compat.fast_transformers.events import EventDispatcher
from lintra.compat.fast_transformers.feature_maps import elu_feature_map


class RecurrentFeatures(nn.Module):
    """Base: `feature_map(query_dimensions)`, by default elu + 1; `eps` is added to the denominator."""

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], nn.Module] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        self.eps = eps
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

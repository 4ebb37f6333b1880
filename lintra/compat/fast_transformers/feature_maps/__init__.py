"""Feature maps: `map(query_dimensions)` gives a module of x [n l h d] -> [n l h f].

Random ones are sampled when they are built and kept in the buffer `omega`, which is saved; the forward pass
draws nothing. `new_feature_map(device)` samples again.
"""

from lintra.compat.fast_transformers.feature_maps.base import (
    ActivationFunctionFeatureMap,
    FeatureMap,
    elu_feature_map,
)
from lintra.compat.fast_transformers.feature_maps.fourier_features import (
    Favor,
    GeneralizedRandomFeatures,
    RandomFourierFeatures,
    SmoothedRandomFourierFeatures,
)

__all__ = [
    "ActivationFunctionFeatureMap",
    "Favor",
    "FeatureMap",
    "GeneralizedRandomFeatures",
    "RandomFourierFeatures",
    "SmoothedRandomFourierFeatures",
    "elu_feature_map",
]

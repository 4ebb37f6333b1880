"""Small decoders of every kind with fused steps and in the runtime; biases and norms are random."""

import torch

from lintra.attention import linear
from lintra.models import decoder

LENGTH = 20  # the number of positions, where it is limited

KINDS = {
    "plain": {},
    "post": {"norm": "post", "final_norm": True},
    "post, no last norm": {"norm": "post", "norm_kind": "rms", "activation": "swiglu"},
    "rms": {"norm_kind": "rms"},
    "relu in the feed-forward": {"activation": "relu", "norm": "post"},
    "swiglu": {"activation": "swiglu", "mlp_ratio": 3.0},
    "kv_heads": {"heads": 6, "kv_heads": 2, "width": 24},
    "one key head": {"heads": 4, "kv_heads": 1, "width": 64},
    "relu": {"attention": linear.Config(feature_map=linear.Relu())},
    "not normalised": {"attention": linear.Config(normalize=False)},
    "context": {"context": (1, 4), "position": "grid", "grid": (5, 4)},
    "tied": {"tie_embeddings": True, "context": (2,)},
    "learned": {"position": "learned", "max_length": LENGTH, "embed": "value"},
}


def build(**changes):
    """In evaluation mode, not as initialised."""
    torch.manual_seed(0)
    options = {"vocabulary": 5, "layers": 2, "heads": 3, "width": 36} | changes
    model = decoder.Config(**options).build().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model

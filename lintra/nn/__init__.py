"""What surrounds a mechanism."""

from lintra.nn.block import Block
from lintra.nn.distributions import LogisticMixture, Logits
from lintra.nn.feed import Feed
from lintra.nn.heads import Heads
from lintra.nn.mask import lengths_to_mask
from lintra.nn.position import Learned, Sinusoidal

__all__ = [
    "Block",
    "Feed",
    "Heads",
    "Learned",
    "LogisticMixture",
    "Logits",
    "Sinusoidal",
    "lengths_to_mask",
]

"""What a recogniser hears in a whole utterance: its text, when each word was said, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lintra.config import fields
from lintra.models import CTC
from lintra.models.ctc import Config
from lintra.nn.mask import padded
from lintra.nn.parameters import reference_param
from lintra.speech import decoding
from lintra.speech.alignment import Word, align, word_times
from lintra.speech.ngram import NGram


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search for a text: the best path, or a beam over texts, with a language model if there is one."""

    beam: int | None = None  # texts that are followed at once; None: the best path alone
    lm: NGram | None = None
    weight: float = 0.5  # of the language model's log-probabilities
    bonus: float = 0.0  # for each symbol, in nats

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, beam=1)
        fields.not_negative(self, "weight")
        fields.finite(self, "bonus")
        if self.beam is None and (self.lm is not None or self.bonus):
            raise ValueError("a language model and a bonus are for a beam, got beam=None")

    def __call__(self, log_probs: Float[Tensor, "t n"]) -> Sequence[int]:
        """The symbols that are found. Raises ValueError for a language model of other symbols."""
        if self.beam is None:
            return decoding.greedy(log_probs)
        weight = 0.0 if self.lm is None else self.weight
        return decoding.beam(log_probs, width=self.beam, lm=self.lm, weight=weight, bonus=self.bonus)[0].ids


@torch.no_grad()
def log_probs(model: CTC, frames: Sequence[Float[np.ndarray, "t i"]]) -> list[Float[Tensor, "t n"]]:
    """The log-probabilities of utterances, heard in one batch; of each what it is alone.

    Raises ValueError for frames of another width than the model's.
    """
    if not len(frames):
        return []
    like = reference_param(model)
    x, mask = padded([torch.from_numpy(np.ascontiguousarray(each)).to(like) for each in frames])
    found, mask = model(x, mask=mask)
    return [each[real] for each, real in zip(found, mask, strict=True)]


def words(config: Config, log_probs: Float[Tensor, "t n"], ids: Sequence[int], *, frames: int) -> list[Word]:
    """When each word of a text that was found was said, on the best path for it. frames: of the utterance;
    the last prediction may stand for more than there are, but no word ends after them."""
    end = frames * config.features.seconds
    return word_times(config.symbols, ids, align(log_probs, ids), seconds=config.seconds, end=end)

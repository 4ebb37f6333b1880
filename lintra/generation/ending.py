"""Early ends of sequences: at an end symbol or after a stop sequence."""

import torch
from jaxtyping import Int
from torch import Tensor

from lintra.generation.options import GenerationOptions

NOTHING = -1  # fills a sequence after its end where there is no symbol `end`


class Ending:
    """Track which sequences of a batch have ended, as their tokens come one by one.

    A sequence ends with the symbol `end`, or as soon as its last tokens are one of the sequences `stop`;
    those of the prompt do not count.
    """

    def __init__(self, options: GenerationOptions, batch: int, device: torch.device):
        self.end = options.end
        self.filler = NOTHING if options.end is None else options.end
        self.stop = [torch.tensor(each, device=device) for each in options.stop]
        self.recent = torch.full((batch, max(map(len, self.stop), default=0)), NOTHING, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)

    def mark(self, sampled: Int[Tensor, "b"]) -> Int[Tensor, "b"]:
        """Return the next tokens: those that were sampled, and the filler where a sequence has ended."""
        if self.end is None and not self.stop:
            return sampled
        token = sampled.masked_fill(self.ended, self.filler)
        if self.end is not None:
            self.ended = self.ended | (token == self.end)
        if self.stop:
            self.recent = torch.cat((self.recent[:, 1:], token[:, None]), 1)
        for stop in self.stop:
            self.ended = self.ended | (self.recent[:, -len(stop) :] == stop).all(1)
        return token

    def all(self) -> bool:
        """Return whether all sequences have ended, which waits for the device where any can."""
        return (self.end is not None or bool(self.stop)) and bool(self.ended.all())

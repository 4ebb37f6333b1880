"""Changes of features that make more of little speech: SpecAugment, and other tempos.

SpecAugment hides bands and spans of features while a recogniser learns: Park et al. 2019, arXiv:1904.08779,
without the time warping, which the authors find to help least. They insert zeros into features whose mean is
zero; here the utterance's own mean of each bin is inserted, which is the same once features are normalised.
"""

import numpy as np
import torch
from torch import Tensor

from lintra.ops import checks
from lintra.ops.padding import real_tokens, zero_padding


def spec_augment(
    x: Tensor,
    mask: Tensor | None,
    generator: torch.Generator,
    *,
    bands: int = 2,
    band: float = 1 / 3,
    spans: int = 2,
    span: int = 100,
    share: float = 0.2,
) -> Tensor:
    """Features x [b t i] with `bands` bands of bins and `spans` spans of frames hidden.

    A band covers 0 to the part `band` of the bins. A span covers 0 to `span` frames, and at most the part
    `share` of its utterance; all sizes and places are equally likely. Both may overlap. mask [b t]: True for
    real frames, which come first; the content of padding stays as it is and changes nothing. The number of
    draws from the generator does not depend on the lengths. Raises TypeError or ValueError.
    """
    for name, value in (("bands", bands), ("spans", spans), ("span", span)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    for name, value in (("band", band), ("share", share)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    sizes: dict[str, int] = {}
    checks.shape("x", x, "b t i", sizes)
    checks.floating("x", x)
    if mask is not None:
        checks.mask(mask, "b t", sizes, x.device)
    t, i = x.shape[1:]
    real = real_tokens(mask, x)
    frames = real.sum(1)
    bins = torch.full_like(frames, i)
    hidden = _intervals((bins * band).long(), bins, bands, i, generator)[:, None, :]
    longest = (frames * share).long().clamp(max=span)
    hidden = hidden | _intervals(longest, frames, spans, t, generator)[:, :, None]
    total = zero_padding(real, x)[0].to(checks.sum_dtype(x.dtype)).sum(1)
    mean = (total / frames.clamp(min=1)[:, None]).to(x.dtype)[:, None]
    return torch.where(hidden & real[..., None], mean, x)


def frames_at(frames: int, speed: float) -> int:
    """Return how many of so many frames are left at a speed, 1.1 for a tenth faster: at least one."""
    return max(1, round(frames / speed))


def changed_tempo(x: np.ndarray, speed: float) -> np.ndarray:
    """Features x [t i] at another tempo, float32 [t / speed i]: interpolated linearly between frames.

    The pitch stays, which a waveform played at another speed changes too.
    """
    if speed == 1 or not len(x):
        return x.astype(np.float32, copy=False)
    places = np.linspace(0, len(x) - 1, frames_at(len(x), speed))
    before = np.minimum(places.astype(int), max(len(x) - 2, 0))
    after = np.minimum(before + 1, len(x) - 1)
    part = (places - before)[:, None]
    return ((1 - part) * x[before] + part * x[after]).astype(np.float32)


def _intervals(longest: Tensor, room: Tensor, number: int, size: int, generator: torch.Generator) -> Tensor:
    """Return the places [b size] of each sample that are in one of `number` intervals.

    longest, room [b]: an interval has 0 to `longest` places, somewhere in the first `room`.
    """
    sampled = torch.rand(2, len(room), number, 1, generator=generator, device=generator.device)
    width, start = sampled.to(room.device)
    width = (width * (longest[:, None, None] + 1)).long()
    start = (start * (room[:, None, None] - width + 1)).long()
    places = torch.arange(size, device=room.device)
    return ((places >= start) & (places < start + width)).any(1)

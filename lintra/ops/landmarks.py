"""Landmarks: the means of segments of a sequence, and the inverse of the attention among them.

n real tokens make m' = min(m, n) segments: the real token of place p belongs to floor(p m' / n), so that none
is empty and their sizes differ by at most 1. Xiong et al. 2021, arXiv:2102.03902, have equal sizes only.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lintra.ops.checks import sum_dtype
from lintra.ops.padding import take

# The smallest singular value that counts, as a part of the largest. An inverse multiplies rounding errors: in
# float32, 1e-7 by a thousand at most; in float64 next to nothing has to be cut off.
CUTOFF = {torch.float32: 1e-3, torch.float64: 1e-8}


class Segments(NamedTuple):
    """Segment of each token; padded tokens belong to none."""

    index: Int[Tensor, "b t"]
    real: Bool[Tensor, "b t"]
    used: Bool[Tensor, "b m"]  # the segments that have tokens

    @classmethod
    def of(cls, mask: Bool[Tensor, "b t"], count: int) -> "Segments":
        """At most `count` segments of the real tokens of each sample; m = min(count, t)."""
        total = mask.sum(1, keepdim=True)
        used = torch.arange(min(count, mask.shape[1]), device=mask.device) < total
        place = (mask.cumsum(1) - 1).clamp(min=0)
        return cls(place * used.sum(1, keepdim=True) // total.clamp(min=1), mask, used)

    def mean(self, x: Float[Tensor, "b t *rest"]) -> Float[Tensor, "b m *rest"]:
        """The mean over each segment, 0 for those without tokens; x is 0 where padded."""
        # A product with the shares of the tokens: unlike a scattered sum, in the same order every time.
        numbers = torch.arange(self.used.shape[1], device=x.device)[:, None]
        share = ((self.index[:, None] == numbers) & self.real[:, None]).to(x.dtype)  # [b m t]
        share = share / share.sum(2, keepdim=True).clamp(min=1)
        return (share @ x.flatten(2)).unflatten(2, x.shape[2:])

    def spread(self, y: Float[Tensor, "b m *rest"]) -> Float[Tensor, "b t *rest"]:
        """Return for each token the value of its segment; anything where padded."""
        return take(y, self.index)


def segment_means(
    x: Float[Tensor, "b t *rest"], count: int, segments: Segments | None = None
) -> Float[Tensor, "b m *rest"]:
    """The means of `segments`, else of min(count, t) made of all tokens; float32 (float64 for float64)."""
    x = x.to(sum_dtype(x.dtype))
    if segments is None:
        if x.shape[1] <= count:
            return x
        if x.shape[1] % count == 0:
            return x.unflatten(1, (count, -1)).mean(2)
        segments = Segments.of(x.new_ones(1, x.shape[1], dtype=torch.bool), count)
    return segments.mean(x)


def iterative_inverse(
    a: Float[Tensor, "*b h i j"], iterations: int, *, alone: bool = True
) -> Float[Tensor, "*b h j i"]:
    """Approximate the pseudo-inverse of each matrix, by products alone; differentiable.

    Begins with a^T / (largest column sum * largest row sum of |a|), the norms of each matrix by itself, or
    the largest among the h of a sample where they are not taken `alone`. An
    iteration turns an eigenvalue 1 - r of a z into 1 - r^3 (3 + r) / 4: small ones grow by 13/4, so that few
    iterations leave directions of small singular values damped, which regularises the inverse.
    Xiong et al. 2021, arXiv:2102.03902; Razavi et al. 2014, Abstract and Applied Analysis.
    """
    size = a.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    if not alone:
        norms = norms.amax(-1, keepdim=True)
    z = a.mT / norms.masked_fill(norms == 0, 1.0)[..., None, None]
    one = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * one - az @ (15 * one - az @ (7 * one - az))) / 4
    return z


def exact_inverse(a: Float[Tensor, "*b i j"]) -> Float[Tensor, "*b j i"]:
    """The pseudo-inverse by singular values; NaN for a matrix with NaN or inf in it. float32 or float64.

    Directions of singular values below `CUTOFF` are left out, and count as 0 in the gradient."""
    broken = ~a.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    # One broken matrix would be an error for the whole batch.
    return torch.linalg.pinv(a.masked_fill(broken, 0.0), rtol=CUTOFF[a.dtype]).masked_fill(broken, torch.nan)

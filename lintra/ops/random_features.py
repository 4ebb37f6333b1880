"""Random projections whose features estimate a kernel: E[phi(q) . phi(k)] = kernel(q, k).

Choromanski et al. 2021, arXiv:2009.14794, sections 2.3 and 2.4, for the exponential; Rahimi and Recht 2007
and Cho and Saul 2009, as Peng et al. 2021, arXiv:2103.02143, section 3.1, use them, for unit vectors. Letters
besides those of the sum: m rows of a projection.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Norms = Literal["chi", "constant"]


def independent_gaussian(
    rows: int, dim: int, norms: Norms, generator: torch.Generator
) -> Float[Tensor, "m d"]:
    """Rows of independent directions, float64 on the CPU. "chi": standard normal entries; "constant": of
    length sqrt(dim)."""
    sampled = _normal(rows, dim, generator=generator)
    if norms == "chi":
        return sampled
    return sampled * (math.sqrt(dim) / sampled.norm(dim=1, keepdim=True))


def orthogonal_gaussian(
    rows: int, dim: int, norms: Norms, generator: torch.Generator
) -> Float[Tensor, "m d"]:
    """Sample Gaussian rows whose directions are orthogonal within each block of `dim` rows; the last block
    may be cut short.

    With "chi" each row alone is a standard normal vector, so estimates stay unbiased.
    """
    q, r = torch.linalg.qr(_normal(math.ceil(rows / dim), dim, dim, generator=generator))
    # Without the signs of r's diagonal the directions would be biased: LAPACK chooses q's by its convention.
    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    directions = blocks.mT.flatten(0, 1)[:rows]
    if norms == "constant":
        return directions * math.sqrt(dim)
    return directions * _normal(rows, dim, generator=generator).norm(dim=1, keepdim=True)


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float64)


def project(x: Float[Tensor, "b t h d"], weight: Float[Tensor, "g m d"]) -> Float[Tensor, "b t h m"]:
    """w_r . x for every row of each head. g = 1: all heads share the rows; else h is a multiple of g."""
    if weight.shape[0] == 1:
        return x @ weight[0].mT
    x = x.unflatten(2, (weight.shape[0], -1))
    return torch.einsum("btgrd,gmd->btgrm", x, weight).flatten(2, 3)


def softmax_projection(
    x: Float[Tensor, "b t h d"], weight: Float[Tensor, "g m d"], both_signs: bool
) -> Float[Tensor, "b t h f"]:
    """Return the exponents of positive features.

    phi(x) = f^-1/2 exp(projection - offset) estimates exp(q . k / sqrt(d)).

    f = m, or 2 m with `both_signs`, which takes each row and its opposite ("hyperbolic": less variance).
    """
    projection = project(x, weight * x.shape[-1] ** -0.25)
    return torch.cat((projection, -projection), -1) if both_signs else projection


def softmax_offset(x: Float[Tensor, "b t h d"]) -> Float[Tensor, "b t h"]:
    """|d^-1/4 x|^2 / 2, the same for all features of a vector."""
    return x.square().sum(-1) * (0.5 * x.shape[-1] ** -0.5)


def trigonometric(x: Float[Tensor, "b t h d"], weight: Float[Tensor, "g m d"]) -> Float[Tensor, "b t h f"]:
    """sin and cos of the projections, f = 2 m, of both signs and of length sqrt(m).

    phi(q) . phi(k) / m estimates exp(-|q - k|^2 / 2) for standard normal rows.
    """
    angle = project(x, weight)
    return torch.cat((angle.sin(), angle.cos()), -1)


def arc_cosine(x: Float[Tensor, "b t h d"], weight: Float[Tensor, "g m d"]) -> Float[Tensor, "b t h m"]:
    """max(projection, 0), never negative.

    phi(q) . phi(k) / m estimates |q| |k| (sin a + (pi - a) cos a) / 2 pi for standard normal rows, where a is
    the angle between q and k.
    """
    return torch.relu(project(x, weight))

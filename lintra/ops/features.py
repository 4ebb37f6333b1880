"""Feature maps: replacements for the exponential of softmax. x [... d] -> [... f]."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

FeatureMapName = Literal["elu+1", "relu", "exp"]  # the ones cheap enough to be fused into the sum
STEEPEST = 30.0  # exponents of hedgehog_exp stay within +-30


def elu_plus_one(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """x + 1 above 0, exp(x) below. Katharopoulos et al. 2020, arXiv:2006.16236, equation 7.

    The literal elu(x) + 1 loses every digit of exp(x) below x = -17 in float32 and is 0 at -20.
    """
    return torch.relu(x) + x.clamp(max=0).exp()


def squared_relu(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """max(x, 0)^2. So et al. 2021, arXiv:2109.08668, section 3; used as a feature map since."""
    return torch.relu(x).square()


def dpfp(x: Float[Tensor, "*b d"], nu: int) -> Float[Tensor, "*b f"]:
    """Deterministic parameter-free projection, f = 2 d nu.

    Products of r = [relu(x), relu(-x)] with itself rolled by 1 .. nu. Schlag et al. 2021,
    arXiv:2102.11174, section 5.3.
    """
    r = torch.cat((torch.relu(x), torch.relu(-x)), -1)
    return torch.cat([r * r.roll(i, -1) for i in range(1, nu + 1)], -1)


def taylor2(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b f"]:
    """phi(q) . phi(k) = 1 + u + u^2 / 2 with u = q . k / sqrt(d): exp(u) to second order, at least 1/2.

    f = 1 + d + d (d + 1) / 2, the symmetric square without its duplicates. Arora et al. 2024,
    arXiv:2402.18668, section 4.1.
    """
    x = x * x.shape[-1] ** -0.25
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    scale = torch.where(i == j, 0.5, 1.0).to(x.dtype).sqrt()
    return torch.cat((torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j] * scale), -1)


def hedgehog(
    x: Float[Tensor, "b t h d"], weight: Float[Tensor, "h d d"], bias: Float[Tensor, "h d"]
) -> Float[Tensor, "b t h f"]:
    """softmax over the 2 d features [x W + b, -(x W + b)] of each head. f = 2 d.

    Zhang et al. 2024, arXiv:2402.04347, section 4.2, with one softmax over both signs.
    """
    return torch.softmax(_both_signs(x, weight, bias), -1).clamp(min=1e-12)


def hedgehog_exp(
    x: Float[Tensor, "b t h d"], weight: Float[Tensor, "h d d"], bias: Float[Tensor, "h d"]
) -> Float[Tensor, "b t h f"]:
    """exp of the 2 d features [x W + b, -(x W + b)] of each head, f = 2 d: phi(q) . phi(k) is at least 2 d.

    Zhang et al. 2024, arXiv:2402.04347, section 4.2, as printed; exponents are held within -30 and 30, so
    that float32 has room for products and for their sums.
    """
    return _both_signs(x, weight, bias).clamp(-STEEPEST, STEEPEST).exp()


def _both_signs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.einsum("bthd,hdf->bthf", x, weight) + bias
    return torch.cat((x, -x), -1)


def t2r(
    x: Float[Tensor, "b t h d"], weight: Float[Tensor, "h d f"], bias: Float[Tensor, "h f"]
) -> Float[Tensor, "b t h f"]:
    """relu(x W + b), learned for each head. Kasai et al. 2021, arXiv:2103.13076, section 2.2."""
    return torch.relu(torch.einsum("bthd,hdf->bthf", x, weight) + bias)


FUSED = {"elu+1": elu_plus_one, "relu": torch.relu, "exp": torch.exp}


def apply_feature_map(name: FeatureMapName | None, x: Tensor) -> Tensor:
    """The fused map of that name; None leaves x as it is."""
    return x if name is None else FUSED[name](x)

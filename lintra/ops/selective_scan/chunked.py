"""The selective scan in plain PyTorch: chunks one after the other, each a scan over pairs of tokens.

Steps of the recurrence x_t = a_t x_{t-1} + w_t combine associatively: (a, w) after (a', w') is
(a a', a w' + w) (Blelloch 1990, CMU-CS-90-190, section 1.4). Decays are multiplied and never divided. The [b
c n] numbers of each token exist only while its chunk is computed; where gradients are recorded they are
computed again in the backward, which keeps the states between chunks.

Letters as in `reference`, and r channels to a group.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lintra.ops import checks


def selective_scan_chunked(
    u: Float[Tensor, "b t c"],
    delta: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    D: Float[Tensor, "c"] | None,
    z: Float[Tensor, "b t c"] | None,
    state: Float[Tensor, "b c n"],
    chunk: int,
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c n"]]:
    """Return y and the state after the last token; delta is the softplus of dt and its bias."""
    given = (u, delta, A, B, C, state)
    scan = _scan_chunk
    # Transforms of torch.func refuse what a checkpoint does, and a compiler decides by itself what it keeps.
    if (
        checks.recorded(*given)
        and u.shape[1] > chunk
        and not torch.compiler.is_compiling()
        and not checks.transforming(*given)
    ):
        scan = partial(checkpoint, _scan_chunk, use_reentrant=False, preserve_rng_state=False)
    ys = [torch.zeros_like(u[:, :0])]
    for start in range(0, u.shape[1], chunk):
        tokens = slice(start, start + chunk)
        y, state = scan(u[:, tokens], delta[:, tokens], A, B[:, tokens], C[:, tokens], state)
        ys.append(y)
    y = torch.cat(ys, 1)
    y = y if D is None else y + D * u
    return y if z is None else y * functional.silu(z), state


def _scan_chunk(
    u: Float[Tensor, "b t c"],
    delta: Float[Tensor, "b t c"],
    A: Float[Tensor, "c n"],
    B: Float[Tensor, "b t g n"],
    C: Float[Tensor, "b t g n"],
    state: Float[Tensor, "b c n"],
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "b c n"]]:
    """Return the sum over states, without D, and the state after the last token of one chunk."""
    g = B.shape[2]
    decays = (delta[..., None] * A).exp()
    written = ((delta * u).unflatten(2, (g, -1))[..., None] * B[:, :, :, None]).flatten(2, 3)
    first = written[:, :1] + decays[:, :1] * state[:, None]
    states = _scan(decays, torch.cat((first, written[:, 1:]), 1))
    y = (states.unflatten(2, (g, -1)) @ C[..., None])[..., 0].flatten(2, 3)  # [b t g r n] by [b t g n 1]
    return y, states[:, -1].clone()  # a view would keep all of them


def _scan(decays: Float[Tensor, "b t c n"], written: Float[Tensor, "b t c n"]) -> Float[Tensor, "b t c n"]:
    """Return the states after every token, from a state of 0: those of pairs first, then those between."""
    t = written.shape[1]
    if t == 1:
        return written
    pairs = t // 2 * 2
    early, late = written[:, :pairs:2], written[:, 1::2]
    late_decays = decays[:, 1::2]
    second = _scan(decays[:, :pairs:2] * late_decays, late_decays * early + late)
    between = written[:, 2::2] + decays[:, 2::2] * second[:, : (t - 1) // 2]
    first = torch.cat((written[:, :1], between), 1)
    states = torch.stack((first[:, : t // 2], second), 2).flatten(1, 2)
    return torch.cat((states, first[:, -1:]), 1) if t % 2 else states

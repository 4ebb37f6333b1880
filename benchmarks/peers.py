"""Attention of other libraries, as far as they are installed here, for the same queries, keys and values.

LSH takes 4 rounds. nystrom-attention and linformer offer only a layer with its projections, so that layer is
what is measured.
"""

import contextlib
import io
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lintra.attention import nystromformer
from lintra.bench import points
from lintra.bench.calls import Call, Inputs, draw, passes
from lintra.bench.points import Point

ROOT = Path(__file__).parents[1]
TELL = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.peers import tell"


def missing() -> list[str]:
    """The peers that cannot be imported here."""
    return [name for name, make in PEERS.items() if not _imports(make)]


def call(point: Point, inputs: Inputs) -> Call:
    """Forward + backward of a peer, or of a mechanism of lintra."""
    return PEERS[point.who](inputs) if point.who in PEERS else points.call(point, inputs)


def tell(point: Point, most: int) -> None:
    """Print the `Cost` of a peer, or of a mechanism of lintra, as `points.tell` does."""
    points.tell(point, most, call)


def _imports(make: Callable[[Inputs], Call]) -> bool:
    """Return whether its call can be built, for a few tokens."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make(draw(1, 128, 2, 8))
    except Exception:  # of any kind: it is the code of another library
        return False
    return True


def _fast_transformers(inputs: Inputs) -> Call:
    """Without the mask object that its layer asks for, which holds a number for each pair of tokens."""
    from fast_transformers.attention.causal_linear_attention import causal_linear  # pyright: ignore (may not be here)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        total = torch.einsum("bthf,bthf->bth", q, k.cumsum(1)) + 1e-6
        return causal_linear(q, k, v) / total[..., None]

    return passes(attend, inputs)


def _performer_pytorch(inputs: Inputs) -> Call:
    from performer_pytorch import FastAttention  # pyright: ignore (may not be here)

    attend = FastAttention(inputs[0].shape[-1], causal=True).to(inputs[0].device)
    return passes(lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))), inputs)


def _reformer_pytorch(inputs: Inputs) -> Call:
    from reformer_pytorch import LSHAttention  # pyright: ignore (may not be here)

    attend = LSHAttention(bucket_size=64, n_hashes=4, causal=True).to(inputs[0].device)

    def both() -> None:
        q, v = inputs[0], inputs[2]
        y, *_ = attend(*(x.transpose(1, 2).flatten(0, 1) for x in (q, v)))
        torch.autograd.grad(y.sum(), (q, v))

    return both


def _nystrom_attention(inputs: Inputs) -> Call:
    from nystrom_attention import NystromAttention  # pyright: ignore (may not be here)

    heads, dim = inputs[0].shape[2:]
    landmarks = nystromformer.Config().landmarks  # and no convolution, as here
    return _layer(NystromAttention(heads * dim, dim, heads, num_landmarks=landmarks, residual=False), inputs)


def _linformer(inputs: Inputs) -> Call:
    from linformer import LinformerSelfAttention  # pyright: ignore (may not be here)

    _, tokens, heads, dim = inputs[0].shape
    return _layer(LinformerSelfAttention(heads * dim, tokens, heads=heads), inputs)


def _layer(layer: Any, inputs: Inputs) -> Call:
    x = inputs[0].flatten(2).detach().requires_grad_()
    layer = layer.to(x.device)
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x).sum(), wanted)


# name -> its call. A peer's mechanism here is in COUNTERPARTS.
PEERS: dict[str, Callable[[Inputs], Call]] = {
    "fast-transformers": _fast_transformers,
    "performer-pytorch": _performer_pytorch,
    "reformer-pytorch": _reformer_pytorch,
    "nystrom-attention": _nystrom_attention,
    "linformer-pytorch": _linformer,
}
_PACKAGES = {
    "fast-transformers": "pytorch-fast-transformers",
    "linformer-pytorch": "linformer",
}  # where the package has another name on the index


def versions() -> dict[str, str]:
    """The versions of the peers that are there; of a checkout that was not installed, none is known."""
    here = PEERS.keys() - set(missing())
    return {name: _version(_PACKAGES.get(name, name)) for name in PEERS if name in here}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "a checkout"


COUNTERPARTS = {
    "fast-transformers": "linear",
    "performer-pytorch": "performer",
    "reformer-pytorch": "lsh-4",
    "nystrom-attention": "nystromformer",
    "linformer-pytorch": "linformer",
}

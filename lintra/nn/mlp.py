"""The feed-forward half of a block."""

from functools import partial
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lintra.legacy import renamed_arguments

Activation = Literal["gelu", "gelu_tanh", "swiglu", "relu"]
_PLAIN = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


@renamed_arguments(multiple="ratio", kind="activation")
class MLP(nn.Module):
    """Two linear maps, each token by itself: x [b t c] -> [b t c].

    "gelu" and "relu": W2 gelu(W1 x) and W2 relu(W1 x), `ratio` * c hidden units; "gelu_tanh" is the
    approximation of gelu by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2). "swiglu":
    W2 (silu(W1 x) * W3 x), with two thirds of them so that all kinds have about the same parameters. Shazeer
    2020, arXiv:2002.05202, equation 6.
    """

    def __init__(
        self,
        width: int,  # c, features of a token
        *,
        ratio: float = 4.0,  # hidden units over width
        activation: Activation = "gelu",  # "gelu", "gelu_tanh", "relu" or "swiglu"
        dropout: float = 0.0,  # of the hidden units, in training
    ):
        super().__init__()
        if activation not in get_args(Activation):
            kinds = ", ".join(map(repr, get_args(Activation)))
            raise ValueError(f"activation must be one of {kinds}, got {activation!r}")
        hidden = round(width * ratio * (2 / 3 if activation == "swiglu" else 1))
        if hidden < 1:
            raise ValueError(f"ratio must give at least one hidden unit, got {ratio} of width {width}")
        self.activation = activation
        self.up = nn.Linear(width, 2 * hidden if activation == "swiglu" else hidden)
        self.down = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, -1)
            return self.down(self.dropout(functional.silu(gate) * x))
        x = _PLAIN[self.activation](x)
        return self.down(self.dropout(x) if self.dropout.training else x)

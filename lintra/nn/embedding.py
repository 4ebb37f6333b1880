"""Embeddings of the symbols 0 .. n-1; `start` adds one more, n, that stands before the first."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lintra.nn.parameters import reference_param
from lintra.ops.autocast import follow_autocast, in_autocast, no_autocast, widened
from lintra.ops.checks import sum_dtype


class TokenEmbedding(nn.Module):
    """A learned vector for each symbol."""

    def __init__(self, vocabulary: int, width: int, start: bool):
        super().__init__()
        self.table = nn.Embedding(vocabulary + start, width)
        # The scale at which a sinusoidal code (entries of size about 0.7) neither drowns nor is drowned.
        nn.init.normal_(self.table.weight, std=0.5)

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        return self.table(tokens)


class TiedHead(nn.Module):
    """A linear map x [b t c] -> logits [b t n] whose weight [n c] is the table of a token embedding: the same
    vector represents a symbol when it is read and when it is predicted.

    A start symbol, the last row, is not predicted. Initialises the table with entries of size c^-1/2, so that
    the logits of a normalised x are about 1 in size. Press and Wolf 2017, arXiv:1608.05859.
    """

    def __init__(self, embedding: TokenEmbedding, vocabulary: int):
        super().__init__()
        self._embedding = (embedding,)  # no submodule: the table is saved, and counted, as the embedding's
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(embedding.table.weight, std=embedding.table.embedding_dim**-0.5)

    @property
    def weight(self) -> Tensor:
        """The rows of the table that predict, [n c]."""
        return self._embedding[0].table.weight[: len(self.bias)]

    def forward(self, x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t n"]:
        return functional.linear(x, self.weight, self.bias)


class ContextEmbedding(nn.Module):
    """A learned vector for each symbol, and others for those that stood `context` places earlier, added.

    The symbols of a neighbourhood reach the first layer without attention having to find them: for an image
    as rows of w values, 1, w - 1, w and w + 1 places earlier are those around the one that comes next.
    """

    def __init__(self, vocabulary: int, width: int, context: tuple[int, ...]):
        super().__init__()
        self.context = context
        self.own = TokenEmbedding(vocabulary, width, start=True)
        self.earlier = nn.ModuleList(nn.Embedding(vocabulary + 1, width) for _ in context)
        for weight in self.earlier.parameters():  # all together as large as the symbol's own
            nn.init.normal_(weight, std=0.5 / len(context) ** 0.5)

    def forward(self, tokens: Int[Tensor, "b t"], before: Int[Tensor, "b t o"]) -> Float[Tensor, "b t c"]:
        x = self.own(tokens)
        for table, earlier in zip(self.earlier, before.unbind(-1), strict=True):
            x = x + table(earlier)
        return x


class ValueEmbedding(nn.Module):
    """A linear map of the symbol's place on a scale from -1 to 1: for levels, where 7 is near 8."""

    def __init__(self, vocabulary: int, width: int, start: bool):
        super().__init__()
        self.vocabulary = vocabulary
        self.linear = nn.Linear(1, width)
        self.first = nn.Parameter(torch.randn(width) * 0.5) if start else None

    def forward(self, tokens: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
        own = reference_param(self).dtype
        value = tokens.to(sum_dtype(own)) * (2 / max(1, self.vocabulary - 1)) - 1
        if type(self.linear) is not nn.Linear or (value.dtype == own and not in_autocast(tokens)):
            x = self.linear(value[..., None].to(own))  # what is put in its place, too
        else:  # 16 bits do not tell 1,024 levels apart
            with no_autocast(tokens):
                x = functional.linear(value[..., None], *widened(self.linear.weight, self.linear.bias))
            x = follow_autocast(x)[0] if in_autocast(tokens) else x.to(own)
        if self.first is None:
            return x
        return torch.where((tokens == self.vocabulary)[..., None], self.first.to(x.dtype), x)

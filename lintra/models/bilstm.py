"""A bidirectional LSTM with an encoder's interface: the baseline that transformers are compared with.

    tokens [b t] or features [b t i] -> x [b t c] -> LSTM, both directions -> hidden [b t 2c] -> as an encoder

Hochreiter and Schmidhuber 1997, Neural Computation 9(8); Graves and Schmidhuber 2005, Neural Networks 18(5).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lintra.config import fields
from lintra.models import _io
from lintra.models._io import EncoderIOConfig
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import reference_param
from lintra.ops.autocast import no_autocast
from lintra.ops.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Config(EncoderIOConfig):
    """A bidirectional LSTM."""

    layers: int = 3
    width: int = 320  # c, units of each direction; a token's hidden vector has twice as many
    dropout: float = 0.0  # between layers

    def __post_init__(self):
        super().__post_init__()
        fields.at_least(self, layers=1, width=1)
        fields.probability(self, "dropout")

    def build(self) -> "BiLSTM":
        return BiLSTM(self)


class BiLSTM(nn.Module):
    """tokens [b t] or features [b t i] -> predictions [b o], or [b t o] without a pool."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # Features go in as they are: the first layer is linear in them anyway.
        reads_features = config.inputs is not None
        self.embedding = nn.Identity() if reads_features else _io.input_embedding(config, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.inputs or config.width,
            config.width,
            config.layers,
            batch_first=True,
            bidirectional=True,
            dropout=config.dropout if config.layers > 1 else 0.0,  # PyTorch warns of one layer
        )
        self.head = _io.build_head(config, 2 * config.width)

    def forward(self, x: Tensor, *, mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b *t o"]:
        layout = _io.input_layout(self.config, x, mask, None)
        return _io.predict(self.config.pool, self.head, self._hidden(x, layout), layout)

    def hidden(self, x: Tensor, *, mask: Bool[Tensor, "b t"] | None = None) -> Float[Tensor, "b t d"]:
        """Return the hidden vector of each token, before any prediction; 0 in padded places."""
        return self._hidden(x, _io.input_layout(self.config, x, mask, None))

    def _hidden(self, x: Tensor, layout: Layout) -> Tensor:
        mask, left = layout.mask, layout.left_align()
        warn_if_inverted(mask)
        x = self.dropout(self.embedding(_io.validate_input(self.config, self.lstm, x, layout)))
        if 0 in x.shape[:2]:
            return x.new_zeros(*x.shape[:2], 2 * self.config.width)
        autocast: AbstractContextManager[object] = nullcontext()
        if x.device.type == "cpu":  # where not every processor has an LSTM of 16 bits
            x, autocast = x.to(reference_param(self.lstm).dtype), no_autocast(x)
        with autocast:
            if mask is None or left is None:
                return self.lstm(x)[0]
            lengths = mask.sum(1).clamp(min=1).cpu()  # an empty one runs over one zero, which is then zeroed
            packed = pack_padded_sequence(left.gather(x), lengths, batch_first=True, enforce_sorted=False)
            y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=mask.shape[1])
            return left.restore(y)

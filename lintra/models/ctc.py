"""Recogniser of speech: convolutions that halve the time axis, an encoder, and CTC over symbols.

    x [b t i] -> normalized -> subsampled [b t' c] -> encoder -> log_probs [b t' n+1], 0 the blank

Each stage halves the frames, t' = ceil(t / 2) of them: output j reads frames 2j - 1, 2j and 2j + 1, zeros
where there are none. Padding is such a zero in every stage, so an utterance gives the same in a batch as it
does alone. With a causal encoder, `extend` hears piece by piece what `forward` hears as a whole.

Graves et al. 2006, ICML; Katharopoulos et al. 2020, arXiv:2006.16236, section 4.3.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lintra.attention import Attention
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.config import fields
from lintra.models import bilstm, encoder
from lintra.models.bilstm import BiLSTM
from lintra.models.encoder import Encoder, EncoderState
from lintra.nn.attention_layer import enter
from lintra.nn.mask import warn_if_inverted
from lintra.nn.parameters import check_dtype, reference_param
from lintra.ops import checks
from lintra.ops.padding import real_tokens, zero_padding

_FLAT = 1e-5  # added to variances: a constant band becomes 0
_PART = 2**16  # frames read at once of a corpus that may be larger than the memory


@dataclass(frozen=True, kw_only=True)
class Config:
    """A recogniser. It holds all that transcription needs, and so does a saved model."""

    symbols: Symbols
    features: features.Config  # of the audio, or of the frames it is given
    normalize: Literal["utterance", "global"] = (
        "utterance"  # by whose mean and variance; global: of all training
    )
    subsample: int = 4  # frames that become one: 1, 2 or 4
    encoder: encoder.Config | bilstm.Config  # of `inputs` numbers a frame, what the convolutions make

    def __post_init__(self):
        fields.check(self)
        if self.subsample not in (1, 2, 4):
            raise ValueError(f"subsample must be 1, 2 or 4 frames, got {self.subsample}")
        if self.encoder.inputs is None:
            raise ValueError(f"the encoder must read features, got vocabulary={self.encoder.vocabulary}")
        self.encoder.check_hidden()
        if self.subsample == 1 and self.encoder.inputs != self.features.bins:
            raise ValueError(
                f"with subsample=1 the encoder reads the {self.features.bins} numbers of a frame itself, got "
                f"inputs={self.encoder.inputs}"
            )

    def build(self) -> "CTC":
        return CTC(self)

    def steps(self, frames: int) -> int:
        """Return how many predictions so many frames give."""
        return steps(frames, self.subsample)

    @property
    def seconds(self) -> float:
        """The time from one prediction to the next."""
        return self.features.seconds * self.subsample


def steps(frames: int, subsample: int) -> int:
    """Return how many predictions so many frames give where `subsample` of them become one."""
    return -(-frames // subsample)


class CTCState(NamedTuple):
    """edges [b 1 c] of each stage: the last frame that went in; encoder: its state."""

    edges: tuple[Tensor, ...]
    encoder: EncoderState


class CTC(nn.Module):
    """x [b t i] -> log_probs [b t' n+1] of the blank, 0, and of each symbol, and which are real [b t']."""

    mean: Tensor  # [i], where normalize="global"
    scale: Tensor  # [i], likewise

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        bins, width = config.features.bins, config.encoder.inputs
        assert width is not None
        if config.normalize == "global":
            self.register_buffer("mean", torch.zeros(bins))
            self.register_buffer("scale", torch.ones(bins))
        sizes = [bins, *[width] * (config.subsample.bit_length() - 1)]
        stages = nn.ModuleList(nn.Conv1d(*ends, 3, stride=2) for ends in pairwise(sizes))
        self.stages = cast("list[nn.Conv1d]", stages)
        self.encoder = config.encoder.build()
        hidden = config.encoder.width * (2 if isinstance(config.encoder, bilstm.Config) else 1)
        self.head = nn.Linear(hidden, len(config.symbols.names) + 1)

    def forward(
        self, x: Float[Tensor, "b t i"], *, mask: Bool[Tensor, "b t"] | None = None
    ) -> tuple[Float[Tensor, "b u n"], Bool[Tensor, "b u"]]:
        """Return log_probs of whole utterances, and which are real. The real frames of each count as its
        first ones; log_probs are 0 in padded places, and float32 unless the model is float64."""
        left = enter(x, self.config.features.bins, mask, None).left_align()
        warn_if_inverted(mask)
        check_dtype("x", x, self.head)
        if left is not None:
            x, mask = left.gather(*zero_padding(mask, x)), left.mask
        (x,) = zero_padding(mask, self._normalized(x, mask))
        for stage in self.stages:
            x, _ = _subsample(stage, x, x.new_zeros(x.shape[0], 1, x.shape[2]))
            mask = None if mask is None else mask[:, ::2]
            (x,) = zero_padding(mask, x)
        (log_probs,) = zero_padding(mask, self._log_probs(self.encoder(x, mask=mask)))
        return log_probs, real_tokens(mask, x)

    def start(self, batch: int) -> CTCState:
        """The state before any frame. Raises ValueError for a model that needs whole utterances."""
        if why := self.why_not_extend():
            raise ValueError(f"extend needs a model that can hear piece by piece: {why}")
        like = reference_param(self)
        edges = tuple(like.new_zeros(batch, 1, x.in_channels) for x in self.stages)
        return CTCState(edges, cast("Encoder", self.encoder).start(batch))

    def extend(
        self, x: Float[Tensor, "b t i"], state: CTCState | None = None, *, last: bool = False
    ) -> tuple[Float[Tensor, "b u n"], CTCState]:
        """Return log_probs of the frames after `state` (None: before any), as `forward` does for all at once.

        Their number is a multiple of `subsample`, unless they are the `last` of the utterance: nothing may
        follow then. Raises ValueError otherwise, for a state of another batch, and what `start` raises.
        """
        checks.activations(x, self.config.features.bins)
        check_dtype("x", x, self.head)
        state = self.start(len(x)) if state is None else state
        if not isinstance(state, CTCState):
            raise TypeError(f"state must be a CTCState, got {type(state).__name__}")
        cast("Encoder", self.encoder).check_state(state.encoder, EncoderState, len(x), "x")
        if [x.shape[2] for x in state.edges] != [x.in_channels for x in self.stages]:
            widths, own = [x.shape[2] for x in state.edges], [x.in_channels for x in self.stages]
            raise ValueError(f"state is for stages of widths {widths}, the model has stages of widths {own}")
        if x.shape[1] % self.config.subsample and not last:
            raise ValueError(
                f"x must be a multiple of subsample={self.config.subsample} frames until the last ones, got "
                f"t={x.shape[1]}"
            )
        x, edges = self._normalized(x, None), []
        for stage, before in zip(self.stages, state.edges, strict=True):
            x, edge = _subsample(stage, x, before)
            edges.append(edge)
        hidden, after = cast("Encoder", self.encoder).extend(x, state.encoder)
        return self._log_probs(hidden), CTCState(tuple(edges), after)

    def why_not_extend(self) -> str | None:
        """Return why this model needs whole utterances; None if it does not."""
        if isinstance(self.encoder, BiLSTM):
            return "an LSTM of both directions begins at the end too"
        if not self.encoder.causal:
            remedy = self.encoder.config.causal_arguments()
            return f"its encoder looks at what comes later; build it with {remedy}"
        for attention in self._attentions:
            if not attention.can.recurrent:
                return f"attention {attention.name!r} has no recurrent form"
            if attention.can.lookahead:
                return f"with attention {attention.name!r} later frames decide which earlier ones are seen"
        if self.config.normalize == "utterance":
            return "normalize='utterance' takes the mean of all frames; train with normalize='global'"
        return None

    def why_not_stream(self) -> str | None:
        """Return why this model cannot hear audio in pieces with a state of constant size; None if it can."""
        if why := self.why_not_extend():
            return why
        if self.config.features.kind == "given":
            return "it hears features that are given, and what comes in pieces is audio"
        for attention in self._attentions:
            if attention.can.state == "grows":
                return f"attention {attention.name!r} remembers every frame, so that memory would grow"
        return None

    @torch.no_grad()
    def fit_statistics(self, frames: Float[np.ndarray, "t i"]) -> None:
        """Set the mean and scale of normalize="global" by all frames of the training data, read in parts.

        Until then frames go in as they are. Raises ValueError for another kind of normalization, no frames,
        frames of another width, and numbers that are not finite.
        """
        if self.config.normalize != "global":
            raise ValueError(f"statistics are for normalize='global', got {self.config.normalize!r}")
        bins = self.config.features.bins
        if frames.ndim != 2 or not len(frames) or frames.shape[1] != bins:
            raise ValueError(f"frames must be [t i={bins}], at least one, got shape {list(frames.shape)}")
        parts = [slice(i, i + _PART) for i in range(0, len(frames), _PART)]
        mean = sum(frames[part].sum(0, dtype=np.float64) for part in parts) / len(frames)
        variance = sum(np.square(frames[part] - mean).sum(0) for part in parts) / len(frames)
        if not np.isfinite(variance).all():
            raise ValueError("frames must be finite, got NaN or infinity among them")
        self.mean.copy_(torch.from_numpy(mean))
        self.scale.copy_(torch.from_numpy(1 / np.sqrt(variance + _FLAT)))

    @property
    def _attentions(self) -> list[Attention]:
        return [block.attn.attention for block in cast("Encoder", self.encoder).blocks]

    def _normalized(self, x: Tensor, mask: Tensor | None) -> Tensor:
        wide = x.to(checks.sum_dtype(x.dtype))
        if self.config.normalize == "global":
            return ((wide - self.mean) * self.scale).to(x.dtype)
        count = max(1, x.shape[1]) if mask is None else mask.sum(1).clamp(min=1)[:, None, None]
        (centred,) = zero_padding(mask, wide - wide.sum(1, keepdim=True) / count)
        variance = centred.square().sum(1, keepdim=True) / count
        return (centred * (variance + _FLAT).rsqrt()).to(x.dtype)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """Return log-probabilities in float32 at least: 16 bits lose their small differences."""
        logits = self.head(hidden)
        return logits.to(checks.sum_dtype(logits.dtype)).log_softmax(-1)


def _subsample(stage: nn.Conv1d, x: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a stage to x [b t c] after the frame before it [b 1 c] -> [b ceil(t/2) c'], and the last
    frame."""
    if not x.shape[1]:
        return x.new_zeros(len(x), 0, stage.out_channels), edge
    read = functional.pad(torch.cat((edge, x), 1), (0, 0, 0, x.shape[1] % 2))
    return functional.gelu(stage(read.mT)).mT, x[:, -1:].clone()


def ctc_loss(
    log_probs: Float[Tensor, "b u n"], mask: Bool[Tensor, "b u"], targets: Int[Tensor, "b s"]
) -> Float[Tensor, "b"]:
    """Return -log p of transcripts, symbols 1 .. n-1 padded with 0, in nats: summed over all alignments.

    log_probs and mask are what a recogniser gives. Graves et al. 2006, ICML, section 3.1."""
    lengths = mask.sum(1), (targets > 0).sum(1)
    return functional.ctc_loss(log_probs.transpose(0, 1), targets, *lengths, reduction="none")

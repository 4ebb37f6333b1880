"""Transcription of whole recordings: the text and when each word was said; `transcribe` does all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lintra.audio import features
from lintra.audio.errors import SpeechError
from lintra.audio.waveform import Audio
from lintra.config import fields
from lintra.generation import evaluation
from lintra.models import CTC
from lintra.models.ctc import Config
from lintra.nn.mask import padded
from lintra.nn.parameters import reference_param
from lintra.speech import decoding
from lintra.speech.alignment import Word, align, word_times
from lintra.speech.manifest import Utterance
from lintra.speech.ngram import NGram
from lintra.speech.utterance_features import arrays, given

WIDEST = 10_000  # texts of a beam


@dataclass(frozen=True, kw_only=True)
class Search:
    """Search for a text: the best path, or a beam over texts, with a language model if there is one."""

    beam: int | None = None  # texts followed at once; None: the best path alone
    lm: NGram | None = None
    weight: float = 0.5  # of the language model's log-probabilities
    bonus: float = 0.0  # for each symbol, in nats

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, beam=1)
        if self.beam is not None and self.beam > WIDEST:
            raise ValueError(
                f"beam must be at most {WIDEST:,} texts, got {self.beam:,}: all are looked at in every "
                "frame, and more than some hundreds hardly ever find another text"
            )
        fields.not_negative(self, "weight")
        fields.finite(self, "bonus")
        if self.beam is None and (self.lm is not None or self.bonus):
            raise ValueError("a language model and a bonus are for a beam, got beam=None")

    def __call__(self, log_probs: Float[Tensor, "t n"]) -> Sequence[int]:
        """The symbols that are found. Raises ValueError for a language model of other symbols."""
        if self.beam is None:
            return decoding.greedy(log_probs)
        weight = 0.0 if self.lm is None else self.weight
        return decoding.beam(log_probs, width=self.beam, lm=self.lm, weight=weight, bonus=self.bonus)[0].ids


@dataclass(frozen=True)
class Transcript:
    """Text of a recording, and when each word of it was said."""

    text: str
    words: list[Word]  # with their times; none without timestamps
    duration: float  # seconds of the frames: an incomplete frame at the end does not count


def transcribe(
    model: CTC,
    audio: str | Path | np.ndarray,
    *,
    rate: int | None = None,
    search: Search | None = None,
    timestamps: bool = True,
) -> Transcript:
    """Transcribe a recording.

    audio: an audio file, or float samples [n] in [-1, 1] at `rate` Hz; for a model that was trained on
    features, a .npy or .npz file of them or the array [t i]. search: by default the best path. timestamps:
    without them no words are given, which saves a beam memory in proportion to the frames times the symbols.
    The model is in evaluation mode meanwhile. Raises SpeechError for audio and features that cannot be used,
    ValueError for samples without a rate and a rate without samples.
    """
    config, frames = model.config, frames_of(audio, model.config.features, rate=rate)
    with evaluation(model):
        found = log_probs(model, [frames])[0]
    ids = (search or Search())(found)
    return Transcript(
        text=config.symbols.decode(ids),
        words=words(config, found, ids, frames=len(frames)) if timestamps else [],
        duration=len(frames) * config.features.seconds,
    )


def frames_of(
    audio: str | Path | np.ndarray, config: features.Config, *, rate: int | None = None
) -> Float[np.ndarray, "t i"]:
    """Return the features that a recogniser reads of a recording.

    audio, rate: as `transcribe` takes them; config: of the model. Raises what `transcribe` does.
    """
    if config.kind == "given":
        if rate is not None:
            raise ValueError(f"rate is for samples, and this model hears features: leave it out, got {rate}")
        source = audio if isinstance(audio, np.ndarray) else Path(audio)
        if isinstance(source, Path) and source.suffix not in (".npy", ".npz"):
            raise SpeechError(
                f"this model was trained on features of {config.bins} numbers a frame, not on audio: "
                "it hears such arrays [t i] in .npy files"
            )
        return given(source, config.bins)
    if isinstance(audio, np.ndarray):
        if rate is None:
            raise ValueError("rate must say how many samples a second audio has, got None")
        source = Audio(audio, rate)
    elif rate is not None:
        raise ValueError(f"rate is for samples: {audio} has its own, got {rate}")
    else:
        source = Path(audio)
    return arrays(Utterance(id="recording", audio=source), config, (1.0,))[0]


@torch.no_grad()
def log_probs(model: CTC, frames: Sequence[Float[np.ndarray, "t i"]]) -> list[Float[Tensor, "t n"]]:
    """The log-probabilities of utterances, in one batch; those of each are as alone.

    Raises ValueError for frames of another width than the model's.
    """
    if not len(frames):
        return []
    like = reference_param(model)
    x, mask = padded([torch.from_numpy(np.ascontiguousarray(each)).to(like) for each in frames])
    found, mask = model(x, mask=mask)
    return [each[real] for each, real in zip(found, mask, strict=True)]


def words(config: Config, log_probs: Float[Tensor, "t n"], ids: Sequence[int], *, frames: int) -> list[Word]:
    """Return the words of a recognised text with their times on its best path. frames: of the utterance;
    the last prediction may stand for more than there are, but no word ends after them."""
    path = decoding.best_path(log_probs)
    # The best path of all is its own alignment, which needs no table of frames times symbols.
    if [span.symbol for span in path] == list(ids):
        spans = [(span.first, span.last) for span in path]
    else:
        spans = align(log_probs, ids)
    end = frames * config.features.seconds
    return word_times(config.symbols, ids, spans, seconds=config.seconds, end=end)

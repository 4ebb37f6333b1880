"""Transcribe speech: frames to characters, words or phonemes, by CTC.

The corpus is known by name (AN4, strings of spoken digits) or your own: JSON lines, or a Kaldi folder.
The loss is the sum of -log p of the transcripts over the number of their symbols (Graves et al. 2006, ICML).
Utterances that cannot be learned from are left out and counted: no transcript, unknown symbols, too few
frames.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lintra.attention import AttentionPattern, linear
from lintra.audio import features
from lintra.audio.augment import spec_augment
from lintra.audio.symbols import Symbols, Unit, learn, read_lexicon
from lintra.config import fields
from lintra.io.files import expanded
from lintra.models import CTC, bilstm, ctc, encoder
from lintra.nn.mask import padded
from lintra.speech.computed_corpus import computed
from lintra.speech.corpus import describe_skipped, prepare, write_skipped
from lintra.speech.decoding import greedy
from lintra.speech.manifest import Utterance
from lintra.speech.scoring import Edits
from lintra.tasks.base import Batch, DataError, Samples, Task, TaskConfig, elsewhere
from lintra.tasks.datasets import speech_splits

Data = Literal["an4", "fsdd"]
Preset = Literal["small", "paper"]
Kind = Literal["transformer", "bilstm"]

# Of SpecAugment, milder than in Park et al.: short trainings on little speech.
BAND, SHARE = 0.2, 0.1

_RATES = {"fsdd": 8_000}  # Hz
_BINS = 40  # as the paper

# Settings of lintra.train.Config, for a transformer and for a Bi-LSTM.
PRESETS: dict[tuple[Preset, Kind], dict[str, Any]] = {
    ("small", "transformer"): {
        "steps": 4_000,
        "optimizer": "muon",
        "lr": 3e-3,
        "weight_decay": 0.05,
        "schedule": "wsd",
        "warmup": 100,
        "validate_every": 250,
        "save_every": 250,
    },
    # Its matrices are no linear maps inside blocks, which Muon is for.
    ("small", "bilstm"): {
        "steps": 4_000,
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "schedule": "wsd",
        "warmup": 100,
        "validate_every": 250,
        "save_every": 250,
    },
    ("paper", "transformer"): {
        "steps": 200_000,
        "optimizer": "radam",
        "lr": 1e-4,
        "weight_decay": 0.0,
        "schedule": "plateau",
        "validate_every": 1_000,
    },
    # Without weight decay AdamW is Adam.
    ("paper", "bilstm"): {
        "steps": 200_000,
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "schedule": "plateau",
        "validate_every": 1_000,
    },
}
BATCHES: dict[Preset, int] = {"small": 2_000, "paper": 16_000}  # frames in a step
SUBSAMPLES: dict[Preset, int] = {"small": 4, "paper": 1}


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Transcribe speech (AN4, spoken digits, or your own)."""

    PATHS: ClassVar = ("manifest", "kaldi", "test", "data_dir", "cache", "lexicon")

    data: Data | None = None  # a corpus by its name; or give manifest or kaldi
    manifest: str | None = None  # a file of JSON lines: audio, text
    kaldi: str | None = None  # a folder: wav.scp or feats.scp, text
    test: str | None = None  # a file or folder of either form; else the held-out part
    data_dir: str | None = None  # the corpus' files; else $LINTRA_DATA
    cache: str | None = None  # a folder to keep features in
    on_the_fly: bool = False  # features batch by batch, none kept
    workers: int = 0  # processes that compute ahead, on each device
    preset: Preset = "small"  # paper: its models and training
    encoder: Kind = "transformer"  # a bilstm has no attention
    streaming: bool = False  # causal: it can write while it listens
    units: Unit = "character"  # its symbols; phoneme needs --lexicon
    lexicon: str | None = None  # lines of a word and its phonemes
    rate: int | None = None  # Hz; None: the corpus' own, else 16,000
    bins: int | None = None  # mel filters; None: 40
    shift_ms: float | None = None  # between frames that are given; None: 10
    normalize: Literal["utterance", "global"] | None = None  # None: what --streaming needs
    subsample: int | None = None  # frames merged into one; None: 4, preset paper 1
    batch_frames: int | None = None  # in a step, with padding; None: the preset's
    unmasked: bool = False  # without SpecAugment, like preset paper
    speeds: tuple[float, ...] = (1.0,)  # play each utterance at each of these

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, batch_frames=1, rate=1, bins=1, workers=0)
        if self.on_the_fly and self.cache is not None:
            raise ValueError(
                f"cache keeps features, on_the_fly keeps none: choose one, got cache={self.cache}"
            )
        if self.workers and not self.on_the_fly:
            raise ValueError(f"workers={self.workers} compute features ahead: they go with on_the_fly")
        named = [x for x in ("data", "manifest", "kaldi") if getattr(self, x) is not None]
        if len(named) > 1:
            raise ValueError(f"only one of data, manifest and kaldi can be given, got {' and '.join(named)}")
        if self.data is not None and self.test is not None:
            raise ValueError(f"test goes with manifest or kaldi: {self.data} has a test set of its own")
        if (self.units == "phoneme") != (self.lexicon is not None):
            raise ValueError(f"lexicon goes with units='phoneme', got {self.lexicon} with {self.units!r}")
        if self.shift_ms is not None and not 0.1 <= self.shift_ms <= 1_000:
            raise ValueError(f"shift_ms must be between 0.1 and 1000 milliseconds, got {self.shift_ms}")
        if self.streaming and (self.encoder == "bilstm" or self.normalize == "utterance"):
            raise ValueError(
                "streaming needs a transformer and normalize='global', got "
                f"encoder={self.encoder!r}, normalize={self.normalize!r}"
            )
        if self.subsample not in (None, 1, 2, 4):
            raise ValueError(f"subsample must be 1, 2 or 4 frames, got {self.subsample}")
        if 1.0 not in self.speeds or not all(0.5 <= speed <= 2 for speed in self.speeds):
            raise ValueError(f"speeds must lie in 0.5 .. 2 and hold 1, got {self.speeds}")

    def training_preset(self) -> dict[str, Any]:
        return PRESETS[self.preset, self.encoder]

    def with_data(self, data: str) -> "Config":
        """Return this configuration with `data`, a file of JSON lines or a Kaldi folder, to test on, or what
        was held out of it where it learned from `data`; where it has a corpus, with that in the folder
        `data`."""
        own = self.manifest or self.kaldi
        if own is not None and elsewhere(own, data) is None:
            return replace(self, test=None)
        if self.data is not None and not speech_splits.is_own(data):
            return replace(self, data_dir=data)
        return replace(self, data=None, data_dir=None, test=data)

    def build(self) -> "Speech":
        return Speech(self)


class Utterances(Samples):
    """Samples {"x": [t i] float32, "mask": [t] bool, "targets": [s] int64}; what is padded is 0, also in the
    targets. "x" and "targets" are as long as the longest of a batch.
    """

    def __init__(self, utterances: speech_splits.UtteranceSet, workers: int = 0):
        self.utterances, self.workers = utterances, workers
        self.lengths = [utterances.corpus.frames(place) for place in utterances.places]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        places = [range(len(self))[i] for i in indices]
        frames = [
            torch.from_numpy(self.utterances.corpus.array(self.utterances.places[i]).copy()) for i in places
        ]
        targets = [torch.tensor(self.utterances.targets[i]) for i in places]
        (x, mask), (targets, _) = padded(frames), padded(targets)
        return {"x": x, "mask": mask, "targets": targets}


class Speech(Task):
    name = "speech"

    def __init__(self, config: Config):
        self.config = config
        self.batch_tokens = config.batch_frames or BATCHES[config.preset]
        self.subsample = config.subsample or SUBSAMPLES[config.preset]

    @property
    def length(self) -> int:
        """The steps of the longest utterance to learn from or to validate on, after subsampling."""
        return ctc.steps(max(*self.train.lengths, *self.validate.lengths), self.subsample)

    @cached_property
    def train(self) -> Utterances:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._split("train", self.config.speeds)

    @cached_property
    def validate(self) -> Utterances:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._split("validate")

    @cached_property
    def test(self) -> Utterances:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._split("test") if self.judged_by == "test" else self.validate

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        """The split that `tested` is: "test", or "validate" where there is no test set."""
        return "validate" if self.config.data is None and self.config.test is None else "test"

    @cached_property
    def _corpus(self) -> speech_splits.Splits:
        return speech_splits.read(self.config)

    @cached_property
    def utterances(self) -> speech_splits.Splits:
        """Return the utterances of "train" and "validate", not read yet. Raises DataError and SpeechError."""
        train, validate = speech_splits.hold_back(self._corpus["train"])
        return {"train": train, "validate": validate}

    def held_out(self) -> str:
        ids = "\n".join(each.id for each in self.utterances["validate"])
        return sha256(ids.encode()).hexdigest()[:16]

    @cached_property
    def tested(self) -> list[Utterance]:
        """Return the utterances for the final score, not read yet: a test set, or else those to validate on.
        Raises DataError and SpeechError."""
        if self.config.test is not None:
            return speech_splits.own(self.config.test)
        return self._corpus["test"] if self.config.data is not None else self.utterances["validate"]

    @cached_property
    def symbols(self) -> Symbols:
        """Return the output symbols: those of the transcripts to learn from, or the lexicon's
        phonemes."""
        if self.config.lexicon is not None:
            return learn((), self.config.units, read_lexicon(self.config.lexicon))
        return learn((each.text or "" for each in self.utterances["train"]), self.config.units)

    @cached_property
    def features(self) -> features.Config:
        """Return the features that are made of audio, or given instead of it."""
        rate = self.config.rate or _RATES.get(self.config.data or "", 16_000)
        audio = features.Config(rate=rate, bins=self.config.bins or _BINS)
        found = speech_splits.features_of(self.utterances["train"], audio)
        names, why = ("rate", "bins"), "is for audio, and these are features"
        if found.kind == "fbank":
            names, why = ("shift_ms",), "is for features that are given, and this is audio"
        for name in names:
            if getattr(self.config, name) is not None:
                raise DataError(f"{name} {why}: leave --{name.replace('_', '-')} out")
        if self.config.shift_ms is None:
            return found
        # The length of a frame does not matter for given features: they are not computed.
        return replace(
            found, shift_ms=self.config.shift_ms, frame_ms=max(found.frame_ms, self.config.shift_ms)
        )

    def notices(self, folder: Path) -> list[str]:
        """Return which utterances could not be used: the first ones here, all in a file for each split."""
        found = []
        for split, samples in (("train", self.train), ("validate", self.validate)):
            file, skipped = folder / f"skipped-{split}.jsonl", samples.utterances.skipped
            write_skipped(file, skipped)
            if skipped:
                found.append(f"{split}: {describe_skipped(skipped, file)}")
        return found

    def cached(self, split: str) -> Path | None:
        """The file that keeps the features of "train", "validate" or "test", each test set in its own; None:
        they are not kept."""
        if self.config.cache is None:
            return None
        if split == "test" and (place := self.config.test or self.config.data_dir):
            split += f"-{sha256(os.fsencode(expanded(place).absolute())).hexdigest()[:8]}"
        return expanded(self.config.cache) / f"{split}.safetensors"

    def _split(self, split: str, speeds: tuple[float, ...] = (1.0,)) -> Utterances:
        utterances = self.tested if split == "test" else self.utterances[split]
        with self.watch(f"features to {split} on", len(utterances), "utterances") as report:
            options: Any = {"speeds": speeds, "report": report}
            if self.config.on_the_fly:
                found = computed(utterances, self.features, **options)
            else:
                found = prepare(utterances, self.features, cache=self.cached(split), **options)
        chosen = speech_splits.UtteranceSet.of(found, self.symbols, self.subsample, split)
        return Utterances(chosen, self.config.workers)

    def model(self, attention: AttentionPattern) -> ctc.Config:
        """Return the paper's network: 9 layers, 6 heads of 64 (it does not say how wide); a Bi-LSTM of 3
        layers of 320. Ours are small enough for two cores.
        """
        config, small = self.config, self.config.preset == "small"
        if config.encoder == "bilstm":
            if attention != linear.Config():
                raise ValueError("attention is for encoder='transformer', a Bi-LSTM has none: leave it out")
            layers = bilstm.Config(
                inputs=self._inputs(128 if small else 320),
                layers=3,
                width=128 if small else 320,
                dropout=0.2 if small else 0.0,
            )
        else:
            width = 128 if small else 384
            layers = encoder.Config(
                inputs=self._inputs(width),
                attention=attention,
                causal=True if config.streaming else None,
                layers=4 if small else 9,
                heads=4 if small else 6,
                width=width,
                mlp_ratio=4,
                dropout=0.1,
            )
            layers = _turned(layers) if small else layers
        return ctc.Config(
            symbols=self.symbols,
            features=self.features,
            normalize=config.normalize or ("global" if config.streaming else "utterance"),
            subsample=self.subsample,
            encoder=layers,
        )

    def _inputs(self, width: int) -> int:
        """Return the width the encoder reads: what convolutions make, or the frames themselves."""
        return self.features.bins if self.subsample == 1 else width

    def prepare(self, model: CTC) -> None:
        if model.config.normalize == "global":
            model.fit_statistics(self.train.utterances.corpus.sampled_frames())

    def check(self, model: ctc.Config) -> None:
        for name in ("symbols", "features"):
            if getattr(model, name) != getattr(self, name):
                raise DataError(
                    f"the data have other {name} than those the run began with: put the data back as they "
                    "were, or begin a new run"
                )

    def loss(self, model: CTC, batch: Batch) -> Tensor:
        x = batch["x"]
        if model.training and self.config.preset != "paper" and not self.config.unmasked:
            # Drawn after the global generator, which training seeds at each step, as dropout is.
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
            # Neighbouring numbers of given frames need not be neighbouring frequencies.
            bands = 2 if self.features.kind == "fbank" else 0
            x = spec_augment(x, batch["mask"], generator, bands=bands, band=BAND, share=SHARE)
        log_probs, mask = model(x, mask=batch["mask"])
        return ctc.ctc_loss(log_probs, mask, batch["targets"]).sum() / self.weight(batch)

    def weight(self, batch: Batch) -> Tensor:
        return (batch["targets"] > 0).sum()

    @torch.no_grad()
    def per_sample(self, model: CTC, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats, and the edits between the best path's symbols and the spoken ones."""
        found = model(batch["x"], mask=batch["mask"])
        loss, said = ctc.ctc_loss(found[0], found[1], batch["targets"]), (batch["targets"] > 0).sum(1)
        edits = [
            Edits.between(target[:n].tolist(), greedy(log_probs[mask])).total
            for log_probs, mask, target, n in zip(*found, batch["targets"], said.tolist(), strict=True)
        ]
        return {"loss": loss, "symbol_errors": torch.tensor(edits).to(loss), "weight": said}


def _turned(config: encoder.Config) -> encoder.Config:
    """Return a configuration with rotary positions, unless the mechanism takes none.

    In speech nearby frames matter most; with sinusoidal positions, learning that takes twice as long."""
    rotated = replace(config, position="rotary")
    try:
        with torch.device("meta"):
            rotated.build()
    except ValueError:
        return config  # which says what is wrong, if it is something else
    return rotated

"""Classify texts, byte by byte or by subword tokens.

A file has lines `label TAB ... TAB text`, without a heading: the label is the first column, the text the last
one, and columns between them are ignored. Or it is CSV (.csv) or JSON lines (.jsonl) with a column of
labels and one of texts, in UTF-8. It may be compressed (.xz, .gz). A random tenth of the texts is held out
for validation. The text task of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006) is this with IMDB's
reviews.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lintra.attention import AttentionPattern
from lintra.config import fields
from lintra.models import BiLSTM, Encoder, bilstm, encoder
from lintra.nn.mask import padded
from lintra.tasks._classification import ClassificationTask, logits
from lintra.tasks._text import COPIES, TextTask
from lintra.tasks.base import Batch, DataError, Samples, TaskConfig, elsewhere
from lintra.tasks.datasets import tables, text_files
from lintra.tasks.datasets.documents import check_utf8

_MOST_LABELS = 1_000  # more of them are not labels: the wrong column
_HELD_BACK = 10  # one line in this many, drawn at random, is validated on


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """Classify texts (--data FILE)."""

    PATHS: ClassVar = ("data", "test")
    COPIES: ClassVar = COPIES
    # Version 0.1 validated on the test file where it had one; 0.1 and 0.2 held out every tenth line.
    ABSENT: ClassVar = {"validate_on": "test", "held_out": "tenth"}

    data: str | None = None  # lines label TAB text, .csv or .jsonl (.gz, .xz)
    test: str | None = None  # such a file to test on; else the held-out part
    validate_on: Literal["train", "test"] = "train"  # a held-out tenth, or --test
    held_out: Literal["drawn", "tenth"] = "drawn"  # lines to validate on; tenth: every tenth
    label_column: str | None = None  # of CSV or JSON lines; None: label
    text_column: str | None = None  # None: text
    tokenizer: str | None = None  # a tokenizer.json, for subwords instead of bytes
    length: int = 1_024  # longest text read, in bytes or tokens
    classes: tuple[str, ...] = ()  # their names, in order; none: those in --data

    def __post_init__(self):
        fields.check(self)
        fields.at_least(self, length=1)
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes must all be different, got {self.classes}")
        if len(self.classes) == 1:
            raise ValueError(f"classes must be at least two, got {self.classes}")

    def with_data(self, data: str) -> "Config":
        """Return this configuration with the file at `data` to test on, or the tenth that was held out of it
        where it learned from that file. Raises DataError where it learned from all of it."""
        test = elsewhere(self.data, data)
        if test is None and self.validate_on == "test" and self.test is not None:
            raise DataError(f"all of {data} was learned from: name other data")
        return replace(self, test=test)

    def training_preset(self) -> dict[str, Any]:
        """Settings for about an hour on two cores."""
        return {
            "steps": 3_000,
            "batch": 16,
            "lr": 1e-3,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup": 100,
        }

    def build(self) -> "TextClassification":
        return TextClassification(self)


class Labelled(NamedTuple):
    """The lines of a file: the label of each, and the beginning of its text."""

    labels: list[str]
    texts: list[bytes]


class Lines(NamedTuple):
    """The classes of a text classification, and the labelled lines of each split."""

    classes: list[str]
    train: Labelled
    validate: Labelled


class LabelledSamples(Samples):
    """Samples {"tokens": [t] int64, "mask": [t] bool, "label": int64}; a batch is as long as its longest."""

    def __init__(
        self, lines: Labelled, classes: list[str], encode: Callable[[Sequence[bytes]], list[Tensor]]
    ):
        number = {label: i for i, label in enumerate(classes)}
        self.labels = torch.tensor([number[label] for label in lines.labels])
        self.texts, self.encode = lines.texts, encode

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        tokens, mask = padded(self.encode([self.texts[i] for i in indices]))
        return {"tokens": tokens, "mask": mask, "label": self.labels[torch.as_tensor(indices)]}


class TextClassification(ClassificationTask, TextTask):
    name = "text_classification"
    loss_unit = "nats a text"

    def __init__(self, config: Config):
        self.config = config

    @property
    def length(self) -> int:
        return self.config.length

    @cached_property
    def train(self) -> LabelledSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LabelledSamples(self._lines.train, self.classes, self.encode)

    @cached_property
    def validate(self) -> LabelledSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LabelledSamples(self._lines.validate, self.classes, self.encode)

    @cached_property
    def test(self) -> LabelledSamples:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.config.test is None:
            return self.validate
        return LabelledSamples(self._tested, self.classes, self.encode)

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        return "validate" if self.config.test is None else "test"

    @property
    def classes(self) -> list[str]:
        """Return the labels to learn, in alphabetical order unless one is given; class 0 is the first.
        Read from the data only where the settings have none."""
        return list(self.config.classes) or self._lines.classes

    def notices(self, folder: Path) -> list[str]:
        train, held_out = set(self._lines.train.texts), self._lines.validate.texts
        if not (again := sum(x in train for x in held_out)):
            return []
        return [
            f"{again:,} of the {len(held_out):,} texts to validate on are also among those to learn from: "
            "remove what is there twice, or the accuracy tells little of new texts"
        ]

    def freeze_config(self, config: Config) -> Config:
        return replace(config, classes=tuple(self.classes))

    def check(self, model: encoder.Config | bilstm.Config) -> None:
        if (count := len(self.classes)) != model.outputs:
            raise DataError(
                f"the data have {count} classes, and the model was made for {model.outputs}: put the data "
                "back as they were, or begin a new run"
            )
        super().check(model)

    def encode(self, texts: Sequence[bytes]) -> list[Tensor]:
        """Return the symbols of each text, [t] int64, the first `length` of them. Raises UnicodeDecodeError
        for a text that is not in UTF-8 where a tokenizer reads it."""
        if self.tokenizer is None:
            symbols = [np.frombuffer(text[: self.config.length], np.uint8) for text in texts]
        else:
            symbols = self.tokenizer.encode_all([text.decode() for text in texts])
        return [torch.from_numpy(x[: self.config.length].astype(np.int64)) for x in symbols]

    @cached_property
    def _lines(self) -> Lines:
        """Return what the files hold. Raises DataError."""
        path = text_files.named("data", self.config.data, "a file of lines label TAB text")
        lines = _read(path, self.config)
        if self.config.test is not None and self.config.validate_on == "test":
            train, validate = lines, self._tested
        elif len(lines.labels) < _HELD_BACK:
            raise DataError(
                f"{path} holds {len(lines.labels)} lines: take {_HELD_BACK} or more, of which one in "
                f"{_HELD_BACK} is held out to validate on"
            )
        else:
            number = len(lines.labels)
            if self.config.held_out == "tenth":  # of the same label, where labels take turns
                held_out = np.arange(_HELD_BACK - 1, number, _HELD_BACK)
            else:
                held_out = np.random.default_rng(0).permutation(number)[: number // _HELD_BACK]
            train = _only(lines, np.setdiff1d(np.arange(number), held_out))
            validate = _shuffled(_only(lines, held_out))
        known = list(self.config.classes) or sorted(set(train.labels))
        if len(known) < 2:
            raise DataError(f"{path} has the label {known[0]!r} only: there is nothing to tell apart")
        if len(known) > _MOST_LABELS:
            raise DataError(
                f"{path} has {len(known):,} different labels, more than {_MOST_LABELS:,}: the label must be "
                "the first column, the text the last"
            )
        first, headed = lines.labels[0], tables.is_table(path)
        if not self.config.classes and not headed and lines.labels.count(first) == 1:
            raise DataError(
                f"{path}, line 1: {first!r} is the label of no other line: remove a heading, or name all "
                "labels with --classes"
            )
        _refuse_unknown(path, lines, known, None if self.config.classes else train)
        if self.config.test is not None and not self.config.classes:
            _refuse_unknown(self.config.test, self._tested, known)
        return Lines(known, train, validate)

    @cached_property
    def _tested(self) -> Labelled:
        """Return what the file to test on holds. Raises DataError."""
        path = text_files.named("test", self.config.test, "a file like that of --data")
        lines = _shuffled(_read(path, self.config))
        if self.config.classes:
            _refuse_unknown(path, lines, self.config.classes)
        return lines

    def model(self, attention: AttentionPattern) -> encoder.Config:
        """Return a network small enough for two cores: 2 layers, 4 heads of 32, the mean over all symbols."""
        return encoder.Config(
            vocabulary=self.vocabulary,
            attention=attention,
            layers=2,
            heads=4,
            width=128,
            mlp_ratio=2,
            position="sinusoidal",
            pool="mean",
            outputs=len(self.classes),
            dropout=0.1,
        )

    @torch.no_grad()
    def probabilities(self, model: Encoder | BiLSTM, texts: Sequence[bytes]) -> Tensor:
        """Return the probability of every class for texts that are not empty, cut to the length that was
        learned -> [n classes]."""
        tokens, mask = padded(self.encode(texts))
        device = next(model.parameters()).device
        return logits(model, {"tokens": tokens.to(device), "mask": mask.to(device)}).softmax(-1)

    def ranked(self, model: Encoder | BiLSTM, texts: Sequence[bytes]) -> list[dict[str, float]]:
        """Return the labels of each text with their probabilities, the most probable first."""
        found = self.probabilities(model, texts).tolist() if texts else []
        scores = [dict(zip(self.classes, each, strict=True)) for each in found]
        return [{label: x[label] for label in sorted(x, key=x.__getitem__, reverse=True)} for x in scores]


EMPTY = "has no text: fill it in, or remove the line"
HALF_PAIR = "it has half of a surrogate pair"  # which JSON can say, and no encoding


def as_json(ranked: dict[str, float]) -> dict[str, Any]:
    """Return the most probable label and all scores, rounded, for JSON."""
    scores = {label: round(score, 6) for label, score in ranked.items()}
    return {"label": next(iter(scores)), "scores": scores}


def _read(path: Path, config: Config) -> Labelled:
    """The labelled texts of a file; bytes that are not read are cut off. Raises DataError."""
    if path.is_dir():
        raise DataError(f"{path} is a folder: name a file of lines label TAB text")
    content = text_files.content(path)
    labels, texts = [], []
    kept = config.length if config.tokenizer is None else None  # bytes of a text
    if tables.is_table(path):
        columns = (config.label_column or "label", config.text_column or "text")
        for number, (label, text) in tables.rows(text_files.decoded(content, path), path, columns):
            if not label.strip():
                raise DataError(f"{path}, line {number:,} has no label")
            labels.append(label.strip())
            if not text:
                raise DataError(f"{path}, line {number:,} {EMPTY}")
            try:
                texts.append(text.encode()[:kept])
            except UnicodeEncodeError as error:
                raise DataError(f"{path}, line {number:,} is not text: {HALF_PAIR}") from error
        if not labels:
            raise DataError(f"{path} holds no texts")
        return Labelled(labels, texts)
    if config.label_column or config.text_column:
        raise DataError(f"{path}: columns have names in files that end in {' or '.join(tables.SUFFIXES)}")
    for number, line in enumerate(content.rstrip(b"\r\n").split(b"\n"), 1):
        label, *rest = line.removesuffix(b"\r").split(b"\t")
        if not rest or not label.strip():
            start = line[:40].decode(errors="replace")
            raise DataError(f"{path}, line {number:,}: expected label TAB text, got {start!r}")
        if not rest[-1]:
            raise DataError(f"{path}, line {number:,} {EMPTY}")
        for read in (label,) if config.tokenizer is None else (label, rest[-1]):
            check_utf8(path, number, read)
        labels.append(label.strip().decode())
        texts.append(rest[-1][:kept])
    return Labelled(labels, texts)


def _refuse_unknown(
    file: str | Path, lines: Labelled, known: Sequence[str], train: Labelled | None = None
) -> None:
    """Raise DataError for a label that is not known; train: the lines that labels were to be learned from."""
    if unknown := sorted(set(lines.labels) - set(known)):
        trained = train is None or unknown[0] in train.labels
        held = "" if trained else " but held out, every line of it: add lines"
        raise DataError(
            f"{file} has the label {unknown[0]!r}, which is none of the {len(known)} to learn{held}"
        )


def _shuffled(lines: Labelled) -> Labelled:
    """Return texts in a random order, on which the fingerprints of runs depend."""
    return _only(lines, np.random.default_rng(0).permutation(len(lines.labels)))


def _only(lines: Labelled, places: Iterable[int]) -> Labelled:
    places = list(places)
    return Labelled([lines.labels[i] for i in places], [lines.texts[i] for i in places])

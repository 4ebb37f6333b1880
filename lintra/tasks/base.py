"""The base classes of tasks: data, a default network, a loss and a score, and their settings."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lintra.attention import AttentionPattern
from lintra.io.files import expanded, is_part_of
from lintra.models import Decoder, Model
from lintra.ops.layout import Layout, sequence_bounds

Batch = dict[str, Tensor]
Report = Callable[[int], object]  # called with how many are done
# what is done, how many in all, the unit -> a context that yields a `Report`
Watch = Callable[[str, int, str], AbstractContextManager[Report]]


class DataError(ValueError):
    """Data that is missing, damaged or not available; the message says which file and what to do."""


class Samples(Dataset[Batch], ABC):
    """A data set that is read a batch at a time, since reading sample by sample is slow.

    PyTorch's loader finds `__getitems__` and calls it instead of `__getitem__`; nothing remains to be
    collated.
    """

    workers: int = 0  # processes that read batches ahead, where reading them takes long
    lengths: Sequence[int] = ()  # tokens of each sample, for a task with `batch_tokens`
    spread: bool = False  # whether the first of any number of them are spread evenly over all

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return the samples at these places as one batch. IndexError if one is outside."""

    def __getitem__(self, index: int) -> Batch:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}


def unwatched(what: str, total: int, unit: str) -> AbstractContextManager[Report]:
    """Show nothing."""
    return nullcontext(lambda done: None)


class TaskConfig(ABC):
    """Settings of a task: the base class of each task's `Config`, a frozen dataclass."""

    PATHS: ClassVar[Sequence[str]] = ()  # fields that are places of files
    # Endings of the files that a folder of data is searched for, so that a new file joins them; None: all.
    SEARCHED: ClassVar[Sequence[str] | None] = ()
    COPIES: ClassVar[Mapping[str, str]] = {}  # fields that are files a run keeps a copy of -> its name there

    @abstractmethod
    def build(self) -> "Task":
        """The task with these settings, its data not read yet."""

    def training_preset(self) -> dict[str, Any]:
        """Return the settings of lintra.train.Config that the task is usually trained with."""
        return {}

    def with_data(self, data: str) -> "TaskConfig":
        """Return these settings with the data in the file or folder `data`. Raises DataError for a task that
        reads no files."""
        raise DataError(f"data is for tasks that read files, not {self.build().name}: leave --data out")


def elsewhere(data: str | None, named: str) -> str | None:
    """Return the setting `test` that scores the data at `named`, for a task that holds out a part of its
    training data `data`: None, which scores that part, if these are the data named.

    Raises DataError where one is a part of the other: the rest, or most of it, was learned from."""
    if data is None:
        return named
    there, own = expanded(named), expanded(data)
    if there.resolve() == own.resolve():
        return None
    for part, whole in ((there, own), (own, there)):
        if is_part_of(part, whole):
            raise DataError(
                f"{named} {'is' if part is there else 'has'} a part of {data}, which was learned from: "
                "name other data"
            )
    return named


class Task(ABC):
    """One problem: its data, the network it is usually solved with, its loss and its score."""

    name: str
    config: Any  # the TaskConfig that has built it
    loss_unit: str = "nats a symbol"  # of the loss, as training shows it
    watch: Watch = staticmethod(unwatched)  # shows the progress of long work
    # Where lengths differ much, a batch has as many samples of similar length as have together at most this
    # many tokens, padding included. None: as many samples as training has.
    batch_tokens: int | None = None
    # How many samples make a batch, all processes together. None: as many as training has.
    batch: int | None = None
    # Whether its configuration says how many samples it validates on; else training looks at some of them,
    # evenly spread.
    validates_all: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Task":
        """Return the task itself: its data are large and never change, and copies of what learns from them
        share them."""
        return self

    def notices(self, folder: Path) -> list[str]:
        """Return what a person who trains on it should know of its data, a line each; long lists are written
        to files in `folder`."""
        return []

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of its longest sequence, for mechanisms that need it at construction."""

    @property
    @abstractmethod
    def train(self) -> Samples:
        """The samples to learn from."""

    @property
    @abstractmethod
    def validate(self) -> Samples:
        """The samples for validation during training, none of them in `train` or in a test set."""

    @property
    def test(self) -> Samples:
        """The samples for the final score: those of `validate` where there is no test set."""
        return self.validate

    @property
    def judged_by(self) -> Literal["test", "validate"]:
        """The split that `test` is: "validate" where there is no test set, so that training sees its
        scores."""
        return "validate" if type(self).test is Task.test else "test"

    def held_out(self) -> str | None:
        """Return a digest of which samples `validate` has, found without reading them; None where that needs
        their content."""
        return None

    @abstractmethod
    def model(self, attention: AttentionPattern) -> Any:
        """The task's default network with this mechanism's config, or those of a hybrid: a `Config` of
        lintra/models."""

    def prepare(self, model: Model) -> None:  # noqa: B027 (most have nothing to set)
        """Set the buffers of a new model that depend on the data, such as normalization statistics."""

    def freeze_config(self, config: Any) -> Any:
        """This configuration of the task, with the values that a run takes from its data and keeps."""
        return config

    def check(self, model: Any) -> None:  # noqa: B027 (most have nothing to say)
        """Raise ValueError if a model of this config does not suit the task, or the data as they are
        now."""

    @abstractmethod
    def loss(self, model: Model, batch: Batch) -> Tensor:
        """The mean of -log p over the batch's predictions, 0 of none, in nats; a scalar with a gradient."""

    @abstractmethod
    def weight(self, batch: Batch) -> Tensor:
        """Return the number of predictions that mean is over: processes that share a batch average by it."""

    @abstractmethod
    def per_sample(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """Return the measurements of each sample, summed over its predictions, without gradients: "loss" in
        nats and the like, and their number as "weight"; all [b]."""

    def score(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """Means over the batch's predictions, 0 of none, without gradients, and their number as "weight"."""
        sums = {name: x.sum() for name, x in self.per_sample(model, batch).items()}
        weight = sums.pop("weight")
        return {**{name: x / weight.clamp(min=1) for name, x in sums.items()}, "weight": weight}


class NextToken(Task):
    """A task in which each token is predicted from those before it, the first from the start symbol; a model
    without one does not predict the first.

    Batches hold "tokens" [b t] int64 and, where only some of them count, "counted" [b t] bool. Where rows are
    of several documents, "documents" [b t] int64 says which one each token is of: it is predicted from those
    before it in its row and its document.
    """

    def loss(self, model: Decoder, batch: Batch) -> Tensor:
        _, log_prob = predict(model, batch)
        return -mean(log_prob, batch)

    def weight(self, batch: Batch) -> Tensor:
        return counted(batch).sum()


class BitsTask(NextToken):
    """A next-token task scored in bits: the size to which its predictions could compress the data."""

    bits: str  # what its score calls the loss in bits

    @torch.no_grad()
    def per_sample(self, model: Decoder, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats over the tokens that count, and the same in bits."""
        log_prob = predict(model, batch)[1]
        loss = -sums(log_prob, batch)
        return {"loss": loss, self.bits: loss / math.log(2), "weight": numbers(log_prob, batch)}


class AccuracyTask(NextToken):
    """A next-token task that has a right answer."""

    @torch.no_grad()
    def per_sample(self, model: Decoder, batch: Batch) -> dict[str, Tensor]:
        """The loss in nats over the tokens that count, and how many of them are the most probable symbol."""
        params, log_prob = predict(model, batch)
        guess = model.output.log_probs(params).argmax(-1)
        return {
            "loss": -sums(log_prob, batch),
            "accuracy": sums((guess == predicted(batch["tokens"], guess)).to(log_prob.dtype), batch),
            "weight": numbers(log_prob, batch),
        }


def predict(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """The distribution of every token, given those before it -> parameters [b t p], log p [b t] in nats."""
    tokens = batch["tokens"]
    if "documents" in batch:
        return _predict_packed(model, tokens, batch["documents"])
    params = model(read(model, tokens))
    return params, model.output.log_prob(params, predicted(tokens, params))


def _predict_packed(model: Decoder, tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Predict tokens [b t] whose rows are documents, each document of a row by itself, as a packed batch."""
    row = tokens.reshape(1, -1)
    layout = Layout.of("tokens", row, None, sequence_bounds(documents))
    params = model(model.shift(row, layout), cu_seqlens=layout)
    log_prob = model.output.log_prob(params, row)
    return params.unflatten(1, tokens.shape)[0], log_prob.view_as(tokens)


def read(model: Decoder, tokens: Tensor) -> Tensor:
    """Return what a model reads to predict tokens [b t]: the start symbol and all but the last.

    Without a start symbol nothing precedes the first token: t is one less.
    """
    return tokens[:, :-1] if model.start_token is None else model.shift(tokens)


def predicted(x: Tensor, predictions: Tensor) -> Tensor:
    """Return the places of x [b t] that predictions [b t' ...] are of: all, or all but the first."""
    return x[:, x.shape[1] - predictions.shape[1] :]


def counted(batch: Batch) -> Tensor:
    """Return [b t] bool: which tokens are predictions that count; all, unless the batch says otherwise."""
    return batch.get("counted", torch.ones_like(batch["tokens"], dtype=torch.bool))


def numbers(values: Tensor, batch: Batch) -> Tensor:
    """Return how many of each sample's values, of [b t], are of tokens that count -> [b]."""
    return predicted(counted(batch), values).sum(1)


def sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` [b t] over the tokens of each sample that count, [b]."""
    return values.where(predicted(counted(batch), values), 0).sum(1)


def mean(values: Tensor, batch: Batch) -> Tensor:
    """The mean of `values` [b t] over the tokens that count, 0 of none: a part of a batch may have none."""
    return sums(values, batch).sum() / numbers(values, batch).sum().clamp(min=1)

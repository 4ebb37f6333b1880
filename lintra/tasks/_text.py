"""Symbols of tasks on text: bytes, or the tokens of a tokenizer."""

from functools import cached_property
from types import MappingProxyType
from typing import Any

from lintra.tasks.base import DataError, Task
from lintra.tasks.datasets.text_files import BYTES
from lintra.tokenizer import Tokenizer

COPIES = MappingProxyType({"tokenizer": "tokenizer.json"})  # of the settings of such a task


class TextTask(Task):
    """A task on text, with the field `tokenizer` in its settings: a file, or None for bytes."""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None of bytes. Raises Error."""
        return None if self.config.tokenizer is None else Tokenizer.read(self.config.tokenizer)

    @property
    def vocabulary(self) -> int:
        """The number of symbols."""
        return BYTES if self.tokenizer is None else self.tokenizer.vocabulary

    @property
    def unit(self) -> str:
        """The symbols in words."""
        return "bytes" if self.config.tokenizer is None else "tokens"

    def check(self, model: Any) -> None:
        if self.vocabulary != model.vocabulary:
            symbols = self.unit if self.tokenizer is None else f"the tokens of {self.config.tokenizer}"
            raise DataError(
                f"{symbols} are {self.vocabulary:,}, and the model was made for {model.vocabulary:,}: take "
                "the tokenizer that it was made for, or begin a new run"
            )

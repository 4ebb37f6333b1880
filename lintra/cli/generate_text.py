"""Texts that `lintra generate` writes, as their tokens come."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from lintra.cli.arguments import UsageError
from lintra.tasks.text import Text
from lintra.tokenizer import TextStream


class Texts:
    """Generated texts, each after its prompt; with `live` they are printed as they come.

    end: a token that ends a text; stop: texts after which one ends.
    """

    def __init__(
        self, task: Text, prompt: Sequence[int], end: int | None, stop: Sequence[str], *, live: bool
    ):
        self.prompt, self.live = task.decode(prompt), live
        self.done: list[str] = []
        self._stream = lambda: TextStream(task.decode, end, stop, prompt)
        self._streams: list[TextStream] = []

    def begin(self, n: int) -> None:
        """Begin n texts, whose tokens come together; a single one where it is printed as it comes."""
        self._streams = [self._stream() for _ in range(n)]
        self._parts: list[list[str]] = [[self.prompt] for _ in range(n)]
        if self.live:
            print(f"\n{shown(self.prompt)}", end="", flush=True)

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Take the next token of each text and return whether all have ended."""
        self._add([stream.push(token) for stream, token in zip(self._streams, tokens, strict=True)])
        return all(stream.ended for stream in self._streams)

    def finish(self) -> None:
        """End all texts, finished or not."""
        self._add([stream.finish() for stream in self._streams])
        self.done += map("".join, self._parts)
        if self.live:
            print(flush=True)

    def _add(self, pieces: list[str]) -> None:
        for parts, piece in zip(self._parts, pieces, strict=True):
            parts.append(piece)
            if self.live and piece:
                print(shown(piece), end="", flush=True)


def write(options: Any, drawing: Any, task: Text) -> None:
    """Write texts with a `Drawing` of lintra.cli.generate, as its `Options` say."""
    prompt = options.prompt or ""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # of bytes that Python reads from the command line as half a pair
        raise UsageError("prompt is not in UTF-8") from error
    given = task.to_tokens(prompt)
    length, prompt = options.length or task.length, given.shape[1]
    if length <= prompt:
        raise UsageError(
            f"length must be more than the {prompt:,} {task.unit} of the prompt, got {length:,}: "
            "say --length N"
        )
    texts = Texts(task, given[0].tolist(), _end(options, task), options.stop, live=options.stream)
    drawing.check(options.samples, prompt, length - prompt)
    written = drawing(given.repeat_interleave(options.samples, 0), length - prompt, texts)
    if not options.stream:
        for text in texts.done[: len(written)]:
            print(f"\n{shown(text)}")


def _end(options: Any, task: Text) -> int | None:
    """Return the token of --end, if any. Raises UsageError for an unknown one."""
    if options.end is None:
        return None
    if task.tokenizer is None:
        raise UsageError(f"end is a token of a tokenizer, and {options.model} writes {task.unit}: use --stop")
    number = task.tokenizer.token(options.end)
    if number is None:
        raise UsageError(f"end must be a token of {task.config.tokenizer}, got {options.end!r}")
    return number


def shown(text: str) -> str:
    """Return a text, or a piece of one, for printing: to a terminal, without control characters, which it
    would obey."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))

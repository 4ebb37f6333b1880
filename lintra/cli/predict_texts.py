"""`lintra predict` for texts: the probability of every class."""

import codecs
import itertools
import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lintra.cli.failures import report_failure
from lintra.cli.json_lines import print_json
from lintra.models import BiLSTM, Encoder
from lintra.tasks import DataError
from lintra.tasks.datasets import tables, text_files
from lintra.tasks.text_classification import HALF_PAIR, TextClassification, as_json

Unread = tuple[str, Exception]  # where, and why


class Text(NamedTuple):
    """A text to classify, and what its line of output begins with."""

    name: dict[str, Any]
    content: bytes


def classify(model: Encoder | BiLSTM, task: TextClassification, options: Any) -> int:
    """Print the classes of the texts that `lintra.cli.predict.Options` names -> the exit code: 1 where some
    could not be read."""
    failed = 0
    texts = _from_files(task, options) if options.files else _from_lines(_stdin(), "stdin")
    if task.tokenizer is not None:
        texts = map(_in_utf8, texts)
    for group in _batches(texts, options.batch) if options.files else _arriving(texts, options.batch):
        found = [x.content for x in group if isinstance(x, Text)]
        said = iter(task.ranked(model, found))
        for x in group:
            if isinstance(x, Text):
                print_json(x.name | as_json(next(said)))
            else:
                failed += 1
                report_failure(*x)
    return 1 if failed else 0


def _stdin() -> Iterable[bytes]:
    """Return a reader of standard input that nobody else has: as Python ends it closes sys.stdin, and aborts
    if a thread waits in its reader."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (AttributeError, OSError):  # it is no file
        return sys.stdin.buffer


def _batches(texts: Iterator[Text | Unread], most: int) -> Iterator[list[Text | Unread]]:
    """Yield texts in groups of `most`."""
    while group := list(itertools.islice(texts, most)):
        yield group


def _arriving(texts: Iterator[Text | Unread], most: int) -> Iterator[list[Text | Unread]]:
    """Yield groups of the texts so far, at most so many: a pipe's next line may be long in coming."""
    waiting: queue.Queue[Text | Unread | BaseException | None] = queue.Queue(most)

    def read() -> None:
        try:
            for text in texts:
                waiting.put(text)
            waiting.put(None)
        except BaseException as error:
            waiting.put(error)

    threading.Thread(target=read, daemon=True).start()
    group: list[Text | Unread] = []
    while True:
        if group and (len(group) == most or waiting.empty()):
            yield group
            group = []
        found = waiting.get()
        if found is None or isinstance(found, BaseException):
            break
        group.append(found)
    if group:
        yield group
    if found is not None:
        raise found


def _from_files(task: TextClassification, options: Any) -> Iterator[Text | Unread]:
    for file in options.files:
        try:
            yield from _in_file(task, file, options)
        except (OSError, ValueError) as error:
            yield str(file), error


def _in_file(task: TextClassification, file: Path, options: Any) -> Iterator[Text | Unread]:
    """Yield the texts of a file, which is read as training reads one. Raises DataError."""
    if not file.exists():
        raise DataError(f"{file} does not exist")
    if file.is_dir():
        raise DataError(f"{file} is a folder: name the files in it")
    content, table = text_files.content(file), tables.is_table(file)
    if options.text_column and not table:
        raise DataError(f"{file}: columns have names in files that end in {' or '.join(tables.SUFFIXES)}")
    if options.lines:
        yield from _from_lines(content.removesuffix(b"\n").split(b"\n"), str(file))
    elif table:
        column = options.text_column or task.config.text_column or "text"
        for number, (text,) in tables.rows(text_files.decoded(content, file), file, [column]):
            try:
                yield _in_line(text.encode(), number, str(file))
            except UnicodeEncodeError:
                yield f"{file}, line {number:,}", ValueError(HALF_PAIR)
    else:
        text = content.rstrip(b"\r\n")  # as a line is read
        yield Text({"file": str(file)}, text) if text else (str(file), ValueError("the text is empty"))


def _from_lines(lines: Iterable[bytes], name: str) -> Iterator[Text | Unread]:
    for number, line in enumerate(lines, 1):
        content = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
        yield _in_line(content.rstrip(b"\r\n"), number, name)


def _in_utf8(text: Text | Unread) -> Text | Unread:
    """Return a text that a tokenizer can read, or why it cannot."""
    if isinstance(text, Text):
        try:
            text.content.decode()
        except UnicodeDecodeError as error:
            file, *line = text.name.values()
            where = f"{file}, line {line[0]:,}" if line else file
            return where, ValueError(f"it is not in UTF-8: it has the byte {error.object[error.start]}")
    return text


def _in_line(content: bytes, number: int, name: str) -> Text | Unread:
    if not content:
        return f"{name}, line {number:,}", ValueError("the text is empty")
    return Text({"file": name, "line": number}, content)

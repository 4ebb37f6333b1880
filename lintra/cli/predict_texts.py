"""`lintra predict` for texts: the probability of every class."""

import codecs
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lintra.cli.failures import report_failure
from lintra.cli.json_lines import say
from lintra.io.files import refuse_irregular
from lintra.models import BiLSTM, Encoder
from lintra.tasks.text_classification import TextClassification, as_json

Unread = tuple[str, Exception]  # where, and why


class Text(NamedTuple):
    """A text to classify, and what its line of output begins with."""

    name: dict[str, Any]
    content: bytes


def classify(model: Encoder | BiLSTM, task: TextClassification, options: Any) -> int:
    """Print the classes of the texts that `lintra.cli.predict.Options` names -> the exit code: 1 where some
    could not be read."""
    failed = 0
    texts = _from_files(options) if options.files else _from_lines(sys.stdin.buffer, "stdin")
    at_once = 1 if not options.files and sys.stdin.isatty() else options.batch
    while group := list(itertools.islice(texts, at_once)):
        found = [x.content for x in group if isinstance(x, Text)]
        said = iter(task.ranked(model, found))
        for x in group:
            if isinstance(x, Text):
                say(x.name | as_json(next(said)))
            else:
                failed += 1
                report_failure(*x)
    return 1 if failed else 0


def _from_files(options: Any) -> Iterator[Text | Unread]:
    for file in options.files:
        try:
            refuse_irregular(file, ValueError)
            content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
        except (OSError, ValueError) as error:
            yield str(file), error
            continue
        if options.lines:
            yield from _from_lines(content.removesuffix(b"\n").split(b"\n"), str(file))
        elif content:
            yield Text({"file": str(file)}, content)
        else:
            yield str(file), ValueError("the text is empty")


def _from_lines(lines: Iterable[bytes], name: str) -> Iterator[Text | Unread]:
    for number, line in enumerate(lines, 1):
        content = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").rstrip(b"\r\n")
        if content:
            yield Text({"file": name, "line": number}, content)
        else:
            yield f"{name}, line {number:,}", ValueError("the text is empty")

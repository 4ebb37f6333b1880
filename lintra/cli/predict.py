"""`lintra predict --model DIR [FILES ...]`: what a model says of new texts or recordings, as JSON lines."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from lintra import checkpoint, train
from lintra.cli.arguments import UsageError, parse
from lintra.cli.failures import report_failure
from lintra.cli.model import Device, chosen
from lintra.io.files import refuse_irregular
from lintra.models import CTC, BiLSTM, Encoder
from lintra.tasks.text_classification import TextClassification, as_json

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Say what new texts are, or what is said in recordings: an object a line, with the scores of a text's
    classes or the words of a recording. A file is one text, or with --lines one a line; without files, every
    line of standard input is a text."""

    files: Files = ()  # texts, or audio files
    model: Path = Path("run")  # the folder of a run or checkpoint
    lines: bool = False  # every line of a file is a text of its own
    batch: int = 32  # texts read at once
    device: Device = "auto"  # auto: a GPU if there is one

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")


Unread = tuple[str, Exception]  # where, and why


class Text(NamedTuple):
    """A text to classify, and what its line of output begins with."""

    name: dict[str, Any]
    content: bytes


def predict_command(args: Sequence[str]) -> int:
    options = parse(
        Options, args, prog="lintra predict", takes="FILES ...", description=Options.__doc__ or ""
    )
    model = checkpoint.load(options.model, chosen(options.device))
    if isinstance(model, CTC):
        return _transcribe(model, options)
    task = train.Run.around(options.model).task.build()
    if not isinstance(task, TextClassification) or not isinstance(model, (Encoder, BiLSTM)):
        raise UsageError(
            f"{options.model} is of the task {task.name}, which has nothing to say of new data: lintra "
            "generate draws or writes with it"
        )
    return _classify(model, task, options)


def _transcribe(model: CTC, options: Options) -> int:
    from lintra.cli.transcripts import heard  # needs lintra[speech]

    if not options.files or options.lines:
        raise UsageError("a recogniser of speech hears audio files: name them, without --lines")
    failed = 0
    for file in options.files:
        try:
            _say(heard(model, file))
        except ValueError as error:
            failed += 1
            report_failure(file, error)
    return 1 if failed else 0


def _classify(model: Encoder | BiLSTM, task: TextClassification, options: Options) -> int:
    failed = 0
    texts = _from_files(options) if options.files else _from_lines(sys.stdin.buffer, "stdin")
    at_once = 1 if not options.files and sys.stdin.isatty() else options.batch
    while group := list(itertools.islice(texts, at_once)):
        found = [x.content for x in group if isinstance(x, Text)]
        said = iter(task.ranked(model, found))
        for x in group:
            if isinstance(x, Text):
                _say(x.name | as_json(next(said)))
            else:
                failed += 1
                report_failure(*x)
    return 1 if failed else 0


def _from_files(options: Options) -> Iterator[Text | Unread]:
    for file in options.files:
        try:
            refuse_irregular(file, ValueError)
            content = file.read_bytes()
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
        content = line.rstrip(b"\r\n")
        if content:
            yield Text({"file": name, "line": number}, content)
        else:
            yield f"{name}, line {number:,}", ValueError("the text is empty")


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content, ensure_ascii=False), flush=True)

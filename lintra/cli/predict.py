"""`lintra predict --model DIR [FILES ...]`: what a model says of new data, as JSON lines."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from lintra import checkpoint, train
from lintra.cli import predict_series, predict_texts
from lintra.cli.arguments import UsageError, changed, check_seed, parse
from lintra.cli.failures import report_failure
from lintra.cli.json_lines import print_json
from lintra.cli.model import Device, chosen
from lintra.config import fields
from lintra.models import CTC, BiLSTM, Encoder, Forecaster
from lintra.tasks.series import SeriesTask
from lintra.tasks.text_classification import TextClassification

Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]

OF_TEXTS = ("lines", "text_column")
OF_SERIES = ("quantiles", *predict_series.OF_FILES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Classify texts, forecast series or transcribe recordings: one object per line, with the scores of a
    text's classes, the quantiles of a forecast or the words of a recording. A text file is one text, or one
    per line with --lines; CSV and JSON lines have one per row. Without files, every line of standard input is
    a text, or the next row of a series, after which the following row is forecast."""

    files: Files = ()  # texts, series (.csv, .jsonl) or audio files
    model: Path  # the folder of a run or checkpoint
    lines: bool = False  # every line of a file is a text of its own
    text_column: str | None = None  # of CSV or JSON lines; else as in training
    horizon: int | None = None  # rows to forecast; else as in training
    samples: int = 100  # paths sampled for each series
    quantiles: tuple[float, ...] = (0.1, 0.9)  # of a forecast, beside its median
    paths: bool = False  # print the sampled paths too
    columns: tuple[str, ...] = ()  # with series; else as in training, like the next two
    time_column: str | None = None  # with their times
    id_column: str | None = None  # rows of one id are one series
    seed: int | None = None  # of the paths
    batch: int = 32  # texts or series read at once
    device: Device = "auto"  # auto: a GPU if there is one

    def __post_init__(self):
        fields.at_least(self, batch=1, horizon=1, samples=1)
        if not all(0 < level < 1 for level in self.quantiles):
            raise ValueError(f"quantiles must be above 0 and below 1, got {self.quantiles}")
        check_seed(self.seed)
        if Path("-") in self.files:
            raise ValueError("files must be names of files, got -: leave it out to read standard input")
        if self.text_column is not None and (self.lines or not self.files):
            raise ValueError("text_column is for the rows of files: name files, without --lines")

    def refuse(self, names: Sequence[str], of: str, why: str) -> None:
        """Raise UsageError if one of these flags is given: they are for another kind of input, `of`."""
        for name in changed(self, names):
            raise UsageError(f"{name} is for {of}, {why}: leave --{name.replace('_', '-')} out")


def predict_command(args: Sequence[str]) -> int:
    options = parse(
        Options, args, prog="lintra predict", takes="FILES ...", description=Options.__doc__ or ""
    )
    model = checkpoint.load(options.model, chosen(options.device))
    other = f"which {options.model} does not read"
    if isinstance(model, CTC):
        options.refuse(OF_SERIES, "series", other)
        options.refuse(("text_column",), "texts", other)
        return _transcribe(model, options)
    task = train.Run.around(options.model).task.build()
    if isinstance(task, SeriesTask) and isinstance(model, Forecaster):
        options.refuse(OF_TEXTS, "texts", other)
        return predict_series.forecast(model, task, options)
    if not isinstance(task, TextClassification) or not isinstance(model, (Encoder, BiLSTM)):
        raise UsageError(
            f"{options.model} is of the task {task.name}: predict is for classifiers of texts, series and "
            "speech; lintra generate draws or writes with it"
        )
    options.refuse(OF_SERIES, "series", other)
    return predict_texts.classify(model, task, options)


def _transcribe(model: CTC, options: Options) -> int:
    from lintra.cli.transcripts import transcribe_as_json  # needs lintra[speech]

    if not options.files or options.lines:
        raise UsageError("a recogniser of speech hears audio files: name them, without --lines")
    failed = 0
    for file in options.files:
        try:
            print_json(transcribe_as_json(model, file))
        except ValueError as error:
            failed += 1
            report_failure(file, error)
    return 1 if failed else 0

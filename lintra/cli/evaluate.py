"""`lintra evaluate --model DIR`."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lintra import evaluate
from lintra.cli import evaluate_series, evaluate_speech, memory
from lintra.cli.arguments import UsageError, changed, check_seed, parse
from lintra.cli.decoding import DecodingOptions
from lintra.cli.evaluation import Evaluation
from lintra.cli.model import (
    Device,
    open_model,
    refuse_changed_data,
    refuse_data,
    refuse_unless_images,
    sampled,
)
from lintra.cli.output import Quiet
from lintra.cli.progress import progress
from lintra.cli.stopping import cut_short, stopping
from lintra.config import fields
from lintra.evaluate import Estimate, hypotheses, pictures
from lintra.io.files import expanded, refuse_folder, refuse_unwritable, write_lines
from lintra.models import Decoder
from lintra.tasks import PixelTask, Task
from lintra.tasks.series import SeriesTask
from lintra.tasks.speech import Speech
from lintra.tasks.text_classification import TextClassification

CHECKED = 8  # samples whose predictions are checked to be probabilities
NAMES = {
    "bits_per_dim_without_the_first": "bits/dim without the first value",
    "bits_per_dim": "bits/dim",
    "bits_per_byte": "bits/byte",
    "bits_per_token": "bits/token",
    "loss": "nats a prediction",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Score a trained model on its whole test set: exact likelihood, error rates of speech, or forecasts
    beside naive ones."""

    model: Path = Path("mnist-small")  # folder of a run or checkpoint, or a bundled model
    limit: int | None = None  # score only this many samples, chosen at random
    batch: int = 32  # samples at once: changes memory and time, not the result
    seed: int = 0  # for that choice, forecasts' paths and pictures
    data: str | None = None  # file or folder to score it on (speech: JSON lines, Kaldi); else the run's own
    device: Device = "auto"  # auto: a GPU if there is one
    pictures: Path | None = None  # a folder for pictures (image tasks)
    json: Path | None = None  # a file for the result, with machine and versions
    hypotheses: tuple[Path, ...] = ()  # files for what it wrote (speech): *.jsonl, *.trn, *.ctm
    predictions: Path | None = None  # a file for the scores of each text (text classification): JSON lines
    output: Quiet = dataclasses.field(default_factory=Quiet)
    decoding: DecodingOptions = dataclasses.field(default_factory=DecodingOptions)  # for speech

    def __post_init__(self):
        fields.at_least(self, limit=1, batch=1)
        check_seed(self.seed)
        if self.pictures is not None and self.pictures.exists() and not self.pictures.is_dir():
            raise ValueError(f"pictures must be a folder, got the file {self.pictures}")
        refuse_folder("json", self.json)
        refuse_folder("predictions", self.predictions)
        for path in self.hypotheses:
            for file in hypotheses.written(path):
                refuse_folder("hypotheses", file)
        read_or_written = [*([Path(self.data)] if self.data else []), *self.written]
        places = [expanded(x).resolve() for x in read_or_written]
        if len(set(places)) < len(places):
            names = ", ".join(map(str, read_or_written))
            raise ValueError(f"data, json, hypotheses and predictions must be different files, got {names}")

    @property
    def written(self) -> list[Path]:
        """Return the requested output files."""
        beside = [file for path in self.hypotheses for file in hypotheses.written(path)]
        return [*beside, *(x for x in (self.json, self.predictions) if x is not None)]


def evaluate_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra evaluate", description=Options.__doc__ or "")
    opened = open_model(options.model, options.device, options.data)
    model, task = opened.model, opened.task
    drawn = [] if options.pictures is None else pictures.files_in(options.pictures)
    refuse_data(opened, [*options.written, *drawn])
    refuse_unwritable(options.json)
    if isinstance(task, Speech):
        return evaluate_speech.evaluate(opened, options)
    for name in [*changed(options.decoding), *(["hypotheses"] if options.hypotheses else [])]:
        raise UsageError(f"{name} is for speech, {options.model} is of the task {task.name}")
    if options.predictions and not isinstance(task, TextClassification):
        raise UsageError(f"predictions are for texts, {options.model} is of the task {task.name}")
    refuse_unwritable(options.predictions)
    if isinstance(task, SeriesTask):
        return evaluate_series.evaluate(opened, options)
    refuse_unless_images(task, options.model, {"pictures": options.pictures})
    task.check(model.config)
    refuse_changed_data(opened)
    refuse_unwritable(options.pictures and options.pictures / "any.png")
    chosen = sampled(len(task.test), options.limit, options.seed)
    if isinstance(model, Decoder):
        memory.check_batch(model, min(options.batch, len(chosen)), task.length, 0)
    off = _checked(model, task, chosen, options)
    evaluation = Evaluation(opened, options, len(task.test))
    nats, batch = torch.empty(0), options.batch
    with (
        progress("scoring", len(chosen), "samples", quiet=options.output.quiet) as report,
        stopping("batch") as stop,
    ):
        if isinstance(task, PixelTask):
            images = task.test.values[chosen]
            nats = evaluate.nats(model, images, batch=batch, report=report, stopped=stop)
            scores = evaluate.of_images(nats, task.length, task.levels)
        else:
            scores = evaluate.scores(model, task, chosen, batch=batch, report=report, stopped=stop)
    scored = min(x.samples for x in scores.values())
    evaluation.finish(scored, "samples")
    print(_table(scores, model))
    if partial := scored < len(chosen):
        print(f"\n{cut_short(f'the first {scored:,} of {len(chosen):,} samples')}")
    if off is not None:
        print(
            f"\nThe probabilities of all {model.config.vocabulary} symbols sum to 1 within {off:.1e} "
            f"(allowed: {evaluate.TOLERANCE:.0e}), checked on {min(len(chosen), CHECKED)} samples"
        )
    found = {name: x.as_json() for name, x in scores.items()}
    evaluation.save(found, partial, probabilities_sum_to_1_within=off, tolerance=evaluate.TOLERANCE)
    if options.predictions and isinstance(task, TextClassification):
        _predict(model, task, chosen[:scored], options, options.predictions)
    if partial:
        return stop.exit_code
    if options.pictures and isinstance(task, PixelTask):
        images, more = task.test.values[chosen], {"batch": batch, "seed": options.seed}
        watch = functools.partial(progress, quiet=options.output.quiet)
        print()
        for path in evaluate.draw(model, task, images, nats, options.pictures, watch=watch, **more):
            print(f"saved in {path}")
    return 0


def _predict(model: Any, task: TextClassification, chosen: list[int], options: Options, file: Path) -> None:
    with progress("predicting", len(chosen), "texts", quiet=options.output.quiet) as report:
        found = evaluate.predictions(model, task, chosen, batch=options.batch, report=report)
        write_lines(file, (json.dumps(each, ensure_ascii=False) for each in found))
    print(f"\npredictions saved in {file}")


def _checked(model: Any, task: Task, chosen: list[int], options: Options) -> float | None:
    """Return how far from 1 probabilities sum; None for a model without a sequence of them. Raises ValueError
    if they do not sum to 1: a score would not be a likelihood."""
    if not isinstance(model, Decoder):
        return None
    tokens = task.test.__getitems__(chosen[:CHECKED])["tokens"]
    off = evaluate.normalisation(model, tokens, seed=options.seed)
    if not off <= evaluate.TOLERANCE:
        raise ValueError(
            f"the probabilities of all {model.config.vocabulary} symbols miss a sum of 1 by {off:.1e}, more "
            f"than {evaluate.TOLERANCE:.0e}: the model in {options.model} gives no likelihood"
        )
    return off


def _table(scores: dict[str, Estimate], model: Any) -> str:
    lines = []
    names = {name: NAMES.get(name, name.replace("_", " ")) for name in scores}
    wide = max(map(len, names.values()))
    for name, x in sorted(scores.items(), key=lambda item: item[0] == "loss"):
        each = x.predictions / x.samples
        note = f"of {each:,.0f} predictions a sample" if each == int(each) else f"of {each:,.1f} on average"
        if name == "bits_per_dim_without_the_first":
            note += ", as Katharopoulos et al. 2020 count"
        elif name == "bits_per_dim" and model.start_token is None:
            note += f", the first one at {math.log2(model.config.vocabulary):.4g} bits: it is not predicted"
        error = "" if math.isnan(x.error) else f" +- {x.error:.4f}"
        lines.append(f"  {names[name]:<{wide}}  {x.mean:.4f}{error}   {note}")
    return "\n".join(lines)

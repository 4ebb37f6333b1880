"""Packs a trained run as one of the models that come with the library, of images or of speech.

    python experiments/ship.py RUN FOLDER                         the model, its settings and learning curve
    lintra evaluate --model FOLDER --json FOLDER/evaluation.json  its score
    python experiments/speech/arrangements.py --data DIR --model FOLDER   of speech: its scores again
    python experiments/ship.py RUN FOLDER                         now with a model card

The data are looked for in the same places as by `lintra train`. A run that began at a packed model continues
its log, and keeps that model's settings and score in before/; FOLDER must be another one. If a training began
at a model that images/grow.py made from another, --grown-from names that other model. --hours is for logs
that do not count minutes; --gpu names the GPU of a training that did not run on a processor.
"""

import argparse
import csv
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lintra import checkpoint, pictures, tasks, train
from lintra.attention import leaves, load
from lintra.bench.reports import by_name, cpu
from lintra.checkpoint import to_json
from lintra.tasks import speech
from lintra.train.curve import MINUTES

sys.path.insert(0, str(Path(__file__).parent / "images"))
import readability

TRAINED = "runs/trained"  # a training whose model another command reads
GROWN = "runs/grown"  # the first weights, as the documentation of images/grow.py calls them
CARD, EVALUATION, RUN, LOG, CURVE = "README.md", "evaluation.json", "run.json", "log.csv", "curve.png"
ARRANGEMENTS = "arrangements.json"
# The RUN and EVALUATION of the training that these weights began from, and its own BEFORE.
BEFORE = "before"
Curves = Mapping[str, Mapping[int, float]]
Card = Callable[[str, Any, dict[str, Any]], str]


def pack(
    run: train.Run,
    folder: Path,
    hours: float | None = None,
    grown_from: str | None = None,
    gpu: str | None = None,
    *,
    model: Any = None,
    scores: str | None = None,
    card: Card | None = None,
    after: str | None = None,
) -> None:
    """Write FOLDER again. An evaluation that is already there stays, and the card is made of it. Raises
    checkpoint.Error if FOLDER holds something else.

    model: the model to pack, made from the trained one; None: the trained one. scores: an evaluation in place
    of the one there. card: makes the beginning of the card from FOLDER's name, the model and the evaluation;
    None: the card of images or of digits. after: a command that makes the model from the trained one, which
    it calls TRAINED."""
    refuse_others(folder)
    if (step := checkpoint.step_of(run.checkpoints()[-1])) < run.steps:
        raise SystemExit(f"{run.folder} has done {step:,} of {run.steps:,} steps: resume it")
    model = checkpoint.load(run.folder) if model is None else model
    curves, before = train.curves(run.folder), _before(run)
    earlier = [] if before is None else _stages(before)
    if before is not None:
        if before.resolve() == folder.resolve():
            raise SystemExit(f"the training began at {folder}: pack it in another folder")
        curves = joined(read_log(before / LOG), sum(each.steps for each in earlier), curves)
    if hours is None and not curves.get(MINUTES):
        raise SystemExit("the log does not count minutes: --hours says how long the training took")
    hours = curves[MINUTES][max(curves[MINUTES])] / 60 if hours is None else hours
    evaluation = folder / EVALUATION
    found = []  # here, of the weights that were packed before
    if scores is None and evaluation.exists():
        scores = evaluation.read_text()
        found.append(evaluation)
    if scores is not None and not _of_all(json.loads(scores)):
        raise SystemExit(f"{evaluation} is of a part of the test samples: evaluate all of them")
    arranged = folder / ARRANGEMENTS
    strings = arranged.read_text() if arranged.exists() else None
    found += [arranged] if strings is not None else []
    if scores is not None and strings is None and card is None and isinstance(run.task, speech.Config):
        raise SystemExit(f"{arranged} is missing: experiments/speech/arrangements.py writes it")
    # Where the data was is nobody else's.
    gone = {name: None for name in ("data_dir", "cache") if hasattr(run.task, name)}
    task = dataclasses.replace(run.task, **gone)
    start = _folder(len(earlier)) if earlier else GROWN if grown_from else run.train.start_from
    training = dataclasses.replace(run.train, start_from=start)
    for config in (task, training):
        for name in config.PATHS:
            if os.path.isabs(getattr(config, name) or ""):
                raise SystemExit(
                    f"{name}={getattr(config, name)} is a place of this machine: it is not published"
                )
    run = dataclasses.replace(run, task=task, model=model.config, train=training)
    stages = [*earlier, run]

    def write(place: Path) -> None:
        checkpoint.write_model(model, place, torch.float16)
        for file in found:
            if json.loads(file.read_text()).get("weights") != checkpoint.digest(place):
                raise SystemExit(
                    f"{file} is of other weights: remove it, pack the run, and evaluate it again"
                )
        dataclasses.replace(run, folder=place).write()
        with (place / LOG).open("w", newline="") as file:
            write_log(file, curves)
        if before is not None:
            (place / BEFORE).mkdir()
            for name in (RUN, EVALUATION):
                if (before / name).exists():
                    shutil.copyfile(before / name, place / BEFORE / name)
            if (before / BEFORE).exists():
                shutil.copytree(before / BEFORE, place / BEFORE / BEFORE)
        steps = sum(each.steps for each in stages)
        loss = curves["train_loss"], curves["validate_loss"]
        unit = "nats per symbol" if isinstance(task, speech.Config) else "nats per value"
        pictures.loss_curve(place / CURVE, *loss, unit=unit, title=f"{folder.name}, {steps:,} steps")
        if scores is not None:
            (place / EVALUATION).write_text(scores)
            name = folder.name if folder.resolve().parent == checkpoint.SHIPPED else folder.as_posix()
            if card is not None:
                text = card(name, model, json.loads(scores))
            elif isinstance(task, speech.Config):
                assert strings is not None
                (place / ARRANGEMENTS).write_text(strings)
                text = of_speech(name, model, json.loads(scores), json.loads(strings))
            else:
                seen = len(task.build().train), _seen(stages, grown_from)
                text = of_images(name, *seen, model, json.loads(scores))
            (place / CARD).write_text(text + _training(stages, hours, grown_from, gpu, after))

    checkpoint.write_atomically(folder, write)


def refuse_others(folder: Path) -> None:
    """Raise checkpoint.Error if FOLDER holds something other than a packed model."""
    checkpoint.refuse_others(folder, CARD, EVALUATION, ARRANGEMENTS, RUN, LOG, CURVE, BEFORE)


def _of_all(evaluation: dict[str, Any]) -> bool:
    """Return whether every test sample was scored."""
    n = evaluation["test_samples"]
    return not evaluation.get("partial") and all(
        x.get("samples", n) == n for x in evaluation["scores"].values()
    )


def _before(run: train.Run) -> Path | None:
    """The packed model that a training started from, if it did."""
    if run.train.start_from is None:
        return None
    folder = checkpoint.find(run.train.start_from)  # of a run, packed, or by the name of what is shipped
    return folder if (folder / LOG).exists() else None


def _stages(folder: Path) -> list[train.Run]:
    """The trainings of a packed model, in order."""
    earlier = _stages(folder / BEFORE) if (folder / BEFORE).exists() else []
    return [*earlier, train.Run.read(folder)]


def _folder(stage: int) -> str:
    """The folder in which the card trains stage 1 and later, if another stage resumes from it."""
    return f"runs/stage-{stage}"


def joined(first: Curves, steps: int, then: Curves) -> Curves:
    """The curves of a training of `steps` and of the one after it, as one; minutes if both count them."""
    minutes = max(first.get(MINUTES, {}).values(), default=0.0)
    return {
        name: {**curve, **{steps + step: y + minutes * (name == MINUTES) for step, y in then[name].items()}}
        for name, curve in first.items()
        if name in then
    }


def read_log(path: Path) -> Curves:
    """Return what `write_log` wrote."""
    found: dict[str, dict[int, float]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    found.setdefault(name, {})[step] = float(value)
    return found


def write_log(file: Any, curves: Curves) -> None:
    """Write a row for each logged step."""
    rows = csv.writer(file)
    rows.writerow(["step", *curves])
    for step in sorted({step for curve in curves.values() for step in curve}):
        rows.writerow([step, *(f"{curve[step]:.6g}" if step in curve else "" for curve in curves.values())])


def of_images(name: str, trained_on: int, epochs: float, model: Any, evaluation: dict[str, Any]) -> str:
    scores = evaluation["scores"]
    whole, paper = scores["bits_per_dim"], scores["bits_per_dim_without_the_first"]
    return f"""# {Path(name).name}

A linear transformer that draws 28 x 28 grey handwritten digits value by value.
{size(model.config, model)} a sequence, from the first value to the last.

```sh
lintra generate --model {name}
```

| {evaluation["test_samples"]:,} test images | bits/dim | standard error |
| --- | --- | --- |
| all 784 values | {whole["mean"]:.4f} | {whole["error"]:.4f} |
| without the first value, as Katharopoulos et al. 2020 count | {paper["mean"]:.4f} | {paper["error"]:.4f} |

From [{EVALUATION}]({EVALUATION}): `lintra evaluate --model {name}` prints these figures.

{_readable(name)}- **Data**: {trained_on:,} training images of MNIST (LeCun, Cortes and Burges), 256 levels,
  nothing added.
- **Meant for** trying the library and measuring its speed. It knows digits like those of MNIST and nothing
  else, and has seen them {epochs:.1f} times; the paper's models saw them 250 times.
"""


def _readable(name: str) -> str:
    """How much of what it draws reads as digits, if that was measured for the model of this name."""
    measured = json.loads(readability.FILE.read_text()) if readability.FILE.exists() else {"rows": []}
    if name not in by_name(measured):
        return ""
    return f"- **Reads as digits**: {readability.sentence(measured, name)}.\n"


def of_speech(name: str, model: Any, evaluation: dict[str, Any], arrangements: dict[str, Any]) -> str:
    config = model.config
    attention = mechanism_name(config.encoder)
    return f"""# {name}

A causal transformer (attention `{attention}`) that writes down spoken English digits while it listens, from
{config.features.bins} mel filters at {config.features.rate:,} Hz, {config.subsample} frames merged into one.
{size(config.encoder, model)}, however long the recording.

```sh
lintra transcribe --model {name} FILE.wav            # --stream writes while it listens
```

{_arranged(arrangements)} One of them in full:

{rates_table(evaluation, "strings")}

From [{EVALUATION}]({EVALUATION}): `lintra evaluate --model {name}` prints these figures.

- **Data**: the Free Spoken Digit Dataset (Jackson et al., CC BY-SA 4.0): 6 speakers; recordings of the
  same speaker are joined into strings of digits. The test strings are of these speakers, from its official
  test split.
- **Meant for** trying the library. It has heard six people say ten words, and writes these words whatever
  else is said.
"""


def rates_table(evaluation: dict[str, Any], samples: str) -> str:
    """The error rates of the test set; `samples` is what its samples are called."""
    head = f"| {evaluation['test_samples']:,} test {samples} | rate | 95 % interval | substituted | inserted "
    rows = (
        f"| {kind} errors | {x['rate']:.2%} | {x['low']:.2%} to {x['high']:.2%} | {x['substitutions']} | "
        f"{x['insertions']} | {x['deletions']} | {x['length']:,} |"
        for kind, x in evaluation["scores"].items()
    )
    return "\n".join([f"{head}| deleted | of |", "| --- | --- | --- | --- | --- | --- | --- |", *rows])


def _arranged(arrangements: dict[str, Any]) -> str:
    """The errors in all arrangements of the test recordings; a single arrangement says little."""
    strings, *_ = arrangements["arrangements"]
    mean, deviation, least, most = (
        f"{by_name(arrangements)[f'{strings}, word errors, {what}']:.2f} %"
        for what in ("mean", "standard deviation", "least", "most")
    )
    return f"""Which recordings of the test set follow each other in its {strings} is chance. In
{len(arrangements["seeds"])} arrangements {mean} of the words are wrong on average, {least} to {most}, with a
standard deviation of {deviation} ([{ARRANGEMENTS}]({ARRANGEMENTS}))."""


def _training(
    stages: Sequence[train.Run],
    hours: float,
    grown_from: str | None,
    gpu: str | None = None,
    after: str | None = None,
) -> str:
    """How the model was trained, on which GPU if it was one, and the commands that train it again."""
    amounts = ", then\n  ".join(f"{run.steps:,} steps of {_amount(run)}" for run in stages)
    commands = [
        _command(run) + (f" --dir {_folder(stage)}" if stage < len(stages) else "")
        for stage, run in enumerate(stages, 1)
    ]
    before = ""
    if grown_from:
        before = f",\n  from weights made of those of {grown_from}"
        commands.insert(0, f"python experiments/images/grow.py {grown_from} {GROWN}")
    if after:
        commands[-1] += f" --dir {TRAINED}"
        commands.append(after)
    again = ", then\n  ".join(f"`{command}`" for command in commands)
    earlier = f" and, of what came before, [{BEFORE}]({BEFORE})" if len(stages) > 1 else ""
    return f"""- **Training**: {amounts}{before}; {_time(hours, gpu)}. Every setting is
  in [{RUN}]({RUN}){earlier}, the losses by step are in [{LOG}]({LOG}){_validated(stages)}.
- **Again**: {again}

![loss by step]({CURVE})
"""


def _time(hours: float, gpu: str | None) -> str:
    if gpu is not None:
        return f"{60 * hours:.0f} minutes\n  of one GPU that did other work too ({gpu})"
    return f"{hours:.1f} hours\n  by the clock on one or two cores that did other work too ({cpu()})"


def _validated(stages: Sequence[train.Run]) -> str:
    """Say that losses in validation are of test images, if they are."""
    if not any(getattr(run.task, "validate_on", "train") == "test" for run in stages):
        return ""
    return (
        ".\n  Those in validation are of the first test images, so that whoever watched them had seen a part "
        "of the test set"
    )


def _amount(run: train.Run) -> str:
    if isinstance(run.task, speech.Config):
        return f"up to {run.task.build().batch_tokens:,} frames"
    return f"{run.train.batch} images, {_epochs(run):.2f} times over the data"


def _seen(stages: Sequence[train.Run], grown_from: str | None) -> float:
    """How often the model has seen its data, counting the model that it was grown from."""
    first = [train.Run.around(grown_from)] if grown_from else []
    return sum(_epochs(run) for run in (*first, *stages))


def _epochs(run: train.Run) -> float:
    return run.steps * run.train.batch / len(run.task.build().train)


def _command(run: train.Run) -> str:
    """Return the command that trains it again, with the flags in which it differs from its task's preset."""
    task = tasks.load(to_json(run.task)["name"])
    flags = _changed(run.task, task.Config(), leave=("data_dir",))
    flags |= _changed(run.train, train.Config(**run.task.training_preset()))
    network = getattr(run.model, "encoder", None) or run.model
    if getattr(network, "alternating", False):
        flags["alternating"] = []
    attention = _mechanism(network)
    if (name := to_json(attention)["name"]) != "linear":
        flags["attention"] = [name]
    if options := _changed(attention, load(name).Config()):
        flags["attention_options"] = [f"{field}={' '.join(words)}" for field, words in options.items()]
    words = (" ".join([f"--{name.replace('_', '-')}", *values]) for name, values in flags.items())
    return " ".join([f"lintra train {run.task.build().name}", *words])


def _mechanism(config: Any) -> Any:
    """The mechanism of a network. Raises ValueError for several: a card describes one."""
    if isinstance(config.attention, tuple):
        raise ValueError(f"a card is of one mechanism, this model has {len(config.attention)}")
    return config.attention


def mechanism_name(config: Any) -> str:
    """The name of a network's mechanism at the command line. Raises ValueError for several."""
    return to_json(_mechanism(config))["name"]


def _changed(config: Any, preset: Any, leave: Sequence[str] = ()) -> dict[str, list[str]]:
    """The fields that differ from the preset, as words of the command line."""
    fields = {x.name: getattr(config, x.name) for x in dataclasses.fields(config) if x.name not in leave}
    changed = {name: value for name, value in fields.items() if value != getattr(preset, name)}
    return {
        name: [] if value is True else [str(x) for x in (value if isinstance(value, tuple) else (value,))]
        for name, value in changed.items()
    }


def size(config: Any, model: Any) -> str:
    """Return the part of a card that is common to decoders and encoders with a state of constant size."""
    state = sum(x.nbytes for x in leaves(model.start(1))) / 1024
    return f"{shape(config, model)} Its\nrecurrent state is {state:.0f} KiB"


def shape(config: Any, model: Any) -> str:
    """Return the part of a card that is common to all models."""
    return f"""{config.layers} layers of width {config.width}, {config.heads} heads of {config.dim},
{sum(x.numel() for x in model.parameters()):,} parameters, stored in 16 bits, with computation in 32."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a trained run as a model to come with the library.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, help="how long the training took, if its log does not say")
    parser.add_argument("--grown-from", help="the model that the first weights were grown from")
    parser.add_argument("--gpu", help="name of the GPU it was trained on")
    options = parser.parse_args()
    try:
        pack(train.Run.read(options.run), options.folder, options.hours, options.grown_from, options.gpu)
    except checkpoint.Error as error:
        sys.exit(str(error))
    print(f"packed in {options.folder}")


if __name__ == "__main__":
    main()

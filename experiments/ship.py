"""Packs a trained run as one of the models that come with the library, of images or of speech.

    python experiments/ship.py RUN FOLDER --hours HOURS           the model, its settings and learning curve
    lintra evaluate --model FOLDER --json FOLDER/evaluation.json  its score
    python experiments/ship.py RUN FOLDER --hours HOURS           now with a model card

The data are looked for as `lintra train` does. HOURS is how much processor time the training took. For one
that began at a model that images/grow.py made of another, --grown-from names that one.
"""

import argparse
import csv
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lintra import checkpoint, pictures, tasks, train
from lintra.attention import leaves, load
from lintra.bench._report import cpu
from lintra.checkpoint import to_json
from lintra.tasks import speech

GROWN = "runs/grown"  # the first weights, as the documentation of images/grow.py calls them
CARD, EVALUATION, RUN, LOG, CURVE = "README.md", "evaluation.json", "run.json", "log.csv", "curve.png"


def pack(run: train.Run, folder: Path, hours: float, grown_from: str | None) -> None:
    """Writes FOLDER anew; the evaluation that is there stays, and makes the card. Raises checkpoint.Error
    where there is something else."""
    checkpoint.refuse_others(folder, CARD, EVALUATION, RUN, LOG, CURVE)
    model, curves = checkpoint.load(run.folder), train.curves(run.folder)
    step = checkpoint.step_of(run.checkpoints()[-1])
    evaluation = folder / EVALUATION
    told = evaluation.read_text() if evaluation.exists() else None
    # Where the data was is nobody else's.
    gone = {name: None for name in ("data_dir", "cache") if hasattr(run.task, name)}
    task = dataclasses.replace(run.task, **gone)
    training = dataclasses.replace(run.train, start_from=GROWN if grown_from else run.train.start_from)
    for config in (task, training):
        for name in config.PATHS:
            if os.path.isabs(getattr(config, name) or ""):
                raise SystemExit(f"{name}={getattr(config, name)} is a place of this machine: it is not told")
    run = dataclasses.replace(run, task=task, train=training)

    def write(place: Path) -> None:
        checkpoint.write_model(model, place, torch.float16)
        dataclasses.replace(run, folder=place).write()
        with (place / LOG).open("w", newline="") as file:
            write_log(file, curves)
        loss = curves["train_loss"], curves["validate_loss"]
        unit = "nats per symbol" if isinstance(task, speech.Config) else "nats per value"
        pictures.loss_curve(place / CURVE, *loss, unit=unit, title=f"{folder.name}, {step:,} steps")
        if told is not None:
            (place / EVALUATION).write_text(told)
            name = folder.name if folder.resolve().parent == checkpoint.SHIPPED else folder.as_posix()
            if isinstance(task, speech.Config):
                text = of_speech(name, model, json.loads(told))
            else:
                text = of_images(name, _seen(run, step, grown_from), model, json.loads(told))
            (place / CARD).write_text(text + _training(run, step, hours, grown_from))

    checkpoint.write_atomically(folder, write)


def write_log(file: Any, curves: Mapping[str, Mapping[int, float]]) -> None:
    """A row for each logged step."""
    rows = csv.writer(file)
    rows.writerow(["step", *curves])
    for step in sorted({step for curve in curves.values() for step in curve}):
        rows.writerow([step, *(f"{curve[step]:.6g}" if step in curve else "" for curve in curves.values())])


def of_images(name: str, epochs: float, model: Any, evaluation: dict[str, Any]) -> str:
    scores = evaluation["scores"]
    whole, paper = scores["bits_per_dim"], scores["bits_per_dim_without_the_first"]
    return f"""# {Path(name).name}

A linear transformer that draws 28 x 28 grey handwritten digits value by value.
{_size(model.config, model)} a sequence, from the first value to the last.

```sh
lintra generate --model {name}
```

| {evaluation["test_samples"]:,} test images | bits/dim | standard error |
| --- | --- | --- |
| all 784 values | {whole["mean"]:.4f} | {whole["error"]:.4f} |
| without the first value, as Katharopoulos et al. 2020 count | {paper["mean"]:.4f} | {paper["error"]:.4f} |

From [{EVALUATION}]({EVALUATION}): `lintra evaluate --model {name}` prints these figures.

- **Data**: the 60,000 training images of MNIST (LeCun, Cortes and Burges), 256 levels, nothing added.
- **Meant for** trying the library and measuring its speed. It knows digits like those of MNIST and nothing
  else, and has seen them {epochs:.1f} times where the paper's models saw them 250 times.
"""


def of_speech(name: str, model: Any, evaluation: dict[str, Any]) -> str:
    config, rates = model.config, evaluation["scores"]
    rows = "\n".join(
        f"| {kind} errors | {x['rate']:.2%} | {x['low']:.2%} to {x['high']:.2%} | {x['substitutions']} | "
        f"{x['insertions']} | {x['deletions']} | {x['length']:,} |"
        for kind, x in rates.items()
    )
    attention = to_json(config.encoder.attention)["name"]
    return f"""# {name}

A causal transformer (attention `{attention}`) that writes down spoken English digits while it listens, from
{config.features.bins} mel filters at {config.features.rate:,} Hz, {config.subsample} frames made one.
{_size(config.encoder, model)}, however long one speaks.

```sh
lintra transcribe --model {name} FILE.wav            # --stream writes while it hears
```

| {evaluation["test_samples"]:,} test strings | rate | 95 % interval | substituted | inserted | deleted | of |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

From [{EVALUATION}]({EVALUATION}): `lintra evaluate --model {name}` prints these figures.

- **Data**: the Free Spoken Digit Dataset (Jackson et al., CC BY-SA 4.0): 6 speakers, recordings of one of
  them joined to strings of digits. The test strings are of the same speakers, from its official test split.
- **Meant for** trying the library. It has heard six people say ten words, and writes these words whatever
  else is said.
"""


def _training(run: train.Run, step: int, hours: float, grown_from: str | None) -> str:
    """How it was trained, and how to do it again."""
    before, grow = "", ""
    if grown_from:
        before = f",\n  from weights made of those of {grown_from}"
        grow = f"`python experiments/images/grow.py {grown_from} {GROWN}`, then\n  "
    return f"""- **Training**: {step:,} steps of {_amount(run, step)}{before}; {hours:.1f} hours
  of processor time on one or two cores that did other work too ({cpu()}). Every setting is
  in [{RUN}]({RUN}), the losses by step are in [{LOG}]({LOG}).
- **Again**: {grow}`{_command(run)}`

![loss by step]({CURVE})
"""


def _amount(run: train.Run, step: int) -> str:
    if isinstance(run.task, speech.Config):
        return f"up to {run.task.build().batch_tokens:,} frames"
    return f"{run.train.batch} images, {_epochs(run, step):.2f} times over the data"


def _seen(run: train.Run, step: int, grown_from: str | None) -> float:
    """How often it has seen its data, and that it was made of."""
    own = _epochs(run, step)
    if not grown_from:
        return own
    first = train.Run.around(grown_from)
    return own + _seen(first, first.train.steps, None)


def _epochs(run: train.Run, step: int) -> float:
    return step * run.train.batch / len(run.task.build().train)


def _command(run: train.Run) -> str:
    """What trains it again: with the flags in which it differs from what its task is preset to."""
    task = tasks.load(to_json(run.task)["name"])
    flags = _changed(run.task, task.Config(), leave=("data_dir",))
    told = {name: " ".join(words) for name, words in flags.items()}
    flags |= _changed(run.train, train.Config(**task.training(told)))
    attention = (getattr(run.model, "encoder", None) or run.model).attention
    if (name := to_json(attention)["name"]) != "linear":
        flags["attention"] = [name]
    if options := _changed(attention, load(name).Config()):
        flags["attention_options"] = [f"{field}={' '.join(words)}" for field, words in options.items()]
    words = (" ".join([f"--{name.replace('_', '-')}", *values]) for name, values in flags.items())
    return " ".join([f"lintra train {run.task.build().name}", *words])


def _changed(config: Any, preset: Any, leave: Sequence[str] = ()) -> dict[str, list[str]]:
    """The fields of one that are others than the preset's, as words of the command line."""
    fields = {x.name: getattr(config, x.name) for x in dataclasses.fields(config) if x.name not in leave}
    changed = {name: value for name, value in fields.items() if value != getattr(preset, name)}
    return {
        name: [] if value is True else [str(x) for x in (value if isinstance(value, tuple) else (value,))]
        for name, value in changed.items()
    }


def _size(config: Any, model: Any) -> str:
    """What of a card is the same for a decoder and an encoder whose state is constant."""
    dim, state = config.width // config.heads, sum(x.nbytes for x in leaves(model.start(1))) / 1024
    return f"""{config.layers} layers of width {config.width}, {config.heads} heads of {dim},
{sum(x.numel() for x in model.parameters()):,} parameters, stored in 16 bits and computed with in 32. Its
recurrent state is {state:.0f} KiB"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a trained run as a model to come with the library.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, required=True, help="processor time of the training")
    parser.add_argument("--grown-from", help="the model that the first weights were grown of")
    options = parser.parse_args()
    pack(train.Run.read(options.run), options.folder, options.hours, options.grown_from)
    print(f"packed in {options.folder}")


if __name__ == "__main__":
    main()

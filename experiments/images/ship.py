"""Packs a trained run as one of the models that come with the library: see README.md beside this file.

    python experiments/images/ship.py RUN FOLDER --hours HOURS    the model, its settings and learning curve
    lintra evaluate --model FOLDER --json FOLDER/evaluation.json  its score
    python experiments/images/ship.py RUN FOLDER --hours HOURS    now with a model card

HOURS is how much processor time the training took.
"""

import argparse
import csv
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lintra import checkpoint, pictures, train
from lintra.bench._report import cpu

CARD, EVALUATION, RUN, LOG, CURVE = "README.md", "evaluation.json", "run.json", "log.csv", "curve.png"


def pack(run: train.Run, folder: Path, hours: float) -> None:
    """Writes FOLDER anew; the evaluation that is there stays, and makes the card."""
    model, curves = checkpoint.load(run.folder), train.curves(run.folder)
    step = checkpoint.step_of(run.checkpoints()[-1])
    evaluation = folder / EVALUATION
    told = evaluation.read_text() if evaluation.exists() else None
    task = dataclasses.replace(run.task, data_dir=None)  # where the data was is nobody else's

    def write(place: Path) -> None:
        checkpoint.write_model(model, place, torch.float16)
        train.Run(folder=place, task=task, model=run.model, train=run.train).write()
        with (place / LOG).open("w", newline="") as file:
            write_log(file, curves)
        loss = curves["train_loss"], curves["validate_loss"]
        pictures.loss_curve(
            place / CURVE, *loss, unit="nats per value", title=f"{folder.name}, {step:,} steps"
        )
        if told is not None:
            (place / EVALUATION).write_text(told)
            (place / CARD).write_text(card(folder.name, run, step, model, json.loads(told), hours))

    checkpoint.write_atomically(folder, write)


def write_log(file: Any, curves: Mapping[str, Mapping[int, float]]) -> None:
    """A row for each logged step."""
    rows = csv.writer(file)
    rows.writerow(["step", *curves])
    for step in sorted({step for curve in curves.values() for step in curve}):
        rows.writerow([step, *(f"{curve[step]:.6g}" if step in curve else "" for curve in curves.values())])


def card(name: str, run: train.Run, step: int, model: Any, evaluation: dict[str, Any], hours: float) -> str:
    config, settings = model.config, run.train
    parameters = sum(x.numel() for x in model.parameters())
    dim = config.width // config.heads
    state = 4 * config.layers * config.heads * dim * (dim + 1)
    scores = evaluation["scores"]
    whole, paper = scores["bits_per_dim"], scores["bits_per_dim_without_the_first"]
    epochs = step * settings.batch / len(run.task.build().train)
    return f"""# {name}

A linear transformer that draws 28 x 28 grey handwritten digits value by value: {config.layers} layers of
width {config.width}, {config.heads} heads of {dim}, {parameters:,} parameters, stored in 16 bits and computed
with in 32. Its recurrent state is {state / 1024:.0f} KiB a sequence, from the first value to the last.

| {evaluation["test_samples"]:,} test images | bits/dim | standard error |
| --- | --- | --- |
| all 784 values | {whole["mean"]:.4f} | {whole["error"]:.4f} |
| without the first value, as Katharopoulos et al. 2020 count | {paper["mean"]:.4f} | {paper["error"]:.4f} |

From [{EVALUATION}]({EVALUATION}): `lintra evaluate --model {name}` prints these figures.

- **Data**: the 60,000 training images of MNIST (LeCun, Cortes and Burges), 256 levels, nothing added.
- **Training**: {step:,} steps of {settings.batch} images, {epochs:.2f} times over the data; {hours:.1f} hours
  of processor time on one or two cores that did other work too ({cpu()}). Every setting is
  in [{RUN}]({RUN}), the losses by step are in [{LOG}]({LOG}).
- **Again**: `lintra train images --preset {run.task.preset} --steps {settings.steps} --precision bf16`
- **Meant for** trying the library and measuring its speed. It knows digits like those of MNIST and nothing
  else, and has seen them {epochs:.1f} times where the paper's models saw them 250 times.

![loss by step]({CURVE})

```sh
lintra generate --model {name}
```
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs a trained run as a model to come with the library.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, required=True, help="processor time of the training")
    options = parser.parse_args()
    pack(train.Run.read(options.run), options.folder, options.hours)
    print(f"packed in {options.folder}")


if __name__ == "__main__":
    main()

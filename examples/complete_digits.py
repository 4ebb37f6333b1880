"""Train a small model on handwritten digits, and let it complete digits of which it sees the upper half.

python examples/complete_digits.py --out completed.png

The 1,797 digits of 8 x 8 pixels come with lintra. `--quick` takes seconds and draws noise. Needs
`pip install ".[train]"`.
"""

import argparse
import dataclasses
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lintra import checkpoint, generation, pictures, train
from lintra.attention import linear
from lintra.models.decoder import Decoder
from lintra.tasks import digits

COMPLETED, TIMES = 8, 5  # number of test digits, and of completions of each
SEED = 1


def learn(folder: Path, *, quick: bool) -> Decoder:
    """Train a model of linear attention as a run in `folder`, which can be resumed if killed; return it."""
    task = digits.Config()
    model = task.build().model(linear.Config())
    preset = task.training_preset() | {"steps": 20 if quick else 500}
    settings = train.Config(**preset, precision="32")
    if quick:
        model = dataclasses.replace(model, layers=1, heads=2, width=32)
    run = train.Run.create(folder, task=task, model=model, train=settings)
    train.fit(run)
    return checkpoint.load(folder)


def draw(model: Decoder, prompts: Tensor, steps: int) -> Tensor:
    """Return the continuation of prompts [n t'], generated value by value as an RNN, [n steps]."""
    return generation.generate(model, prompts, steps=steps, temperature=0.8, seed=SEED)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn digits, complete their upper halves.")
    parser.add_argument("--out", type=Path, default=Path("completed.png"), help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    arguments = parser.parse_args()
    task = digits.Config().build()
    with tempfile.TemporaryDirectory() as folder:
        model = learn(Path(folder) / "run", quick=arguments.quick)
    with torch.inference_mode():
        prompts, originals = task.prompts(COMPLETED)
        completed = task.complete(prompts, TIMES, partial(draw, model))
    title = "Test digits, lower halves drawn by an RNN"
    pictures.completions(arguments.out, task.to_images(originals), task.rows(prompts), completed, title)


if __name__ == "__main__":
    main()

"""Pictures of what a model of images has learned: its samples, and what surprises it."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lintra import pictures
from lintra.evaluate.estimates import nats
from lintra.evaluate.out_of_domain import out_of_domain
from lintra.generation import sampling
from lintra.models import Decoder
from lintra.tasks import PixelTask, Watch

TEMPERATURES = (0.7, 0.8, 0.9, 1.0, 1.1)
DRAWN = 8  # images at each temperature
COMPLETED, TIMES = 6, 5  # images completed, and how often each
SHOWN = 5  # images beside the bits of their pixels
OTHERS = 128  # images of each other kind


def files_in(folder: Path) -> list[Path]:
    """Return the files that `draw` writes."""
    names = ("temperatures", "completions", "bits-per-pixel", "out-of-domain")
    return [folder / f"{name}.png" for name in names]


def draw(
    model: Decoder,
    task: PixelTask,
    images: Tensor,
    found: Tensor,
    folder: Path,
    *,
    watch: Watch,
    batch: int,
    seed: int = 0,
) -> list[Path]:
    """Draw four pictures into `folder`, of test images [n t] and what `nats` gives for them -> their
    files."""
    paths = files_in(folder)
    pictures.rows(
        paths[0], _temperatures(model, task, watch, seed), "Samples, by temperature (left), sampled as an RNN"
    )
    few = images[:COMPLETED].long()
    prompts = task.upper(few, 0.5)
    completed = task.complete(prompts, TIMES, _drawing(model, watch, "completions", 1.0, seed))
    title = "Test images, each completed several times"
    pictures.completions(paths[1], task.to_images(few), task.rows(prompts), completed, title)
    bits = bits_of_pixels(task, found)
    pictures.heat(
        paths[2],
        bits.mean(0),
        task.to_images(images[:SHOWN]),
        bits[:SHOWN],
        unit="bits",
        titles=(f"Bits of each pixel, mean of {len(bits):,} test images", "of single test images"),
    )
    kinds = {"test images": found}
    others = out_of_domain(task, images[:OTHERS], seed)
    with watch("scoring other images", sum(map(len, others.values())), "images") as report:
        done = 0
        for kind, x in others.items():
            kinds[kind] = nats(model, x, batch=batch, report=lambda n, done=done: report(done + n))
            done += len(x)
    pictures.histograms(
        paths[3],
        {kind: (x.double().mean(1) / math.log(2)).numpy() for kind, x in kinds.items()},
        x="bits/dim (logarithmic axis)",
        title="What the model makes of images it did not learn from",
    )
    return paths


def bits_of_pixels(task: PixelTask, found: Tensor) -> Tensor:
    """Return what `nats` gives, [n t'], as bits of each pixel [n h w], its channels together; nan for the
    first one where the model does not predict its first value."""
    bits = found.double() / math.log(2)
    unknown = bits.new_full((len(bits), task.length - bits.shape[1]), math.nan)
    return torch.cat((unknown, bits), 1).unflatten(1, task.image_shape).sum(-1)


def _temperatures(model: Decoder, task: PixelTask, watch: Watch, seed: int) -> dict[str, Tensor]:
    """Draw with the same random numbers at each temperature."""
    blank = task.blank(model, DRAWN, seed)
    return {
        f"{temperature:.1f}": task.draw(
            blank, _drawing(model, watch, f"temperature {temperature:g}", temperature, seed)
        )
        for temperature in TEMPERATURES
    }


def _drawing(
    model: Decoder, watch: Watch, what: str, temperature: float, seed: int
) -> Callable[[Tensor, int], Tensor]:
    def drawing(prompts: Tensor, steps: int) -> Tensor:
        tokens: list[Tensor] = []
        with watch(what, steps, "steps") as report:
            for token in sampling.stream(model, prompts, steps=steps, temperature=temperature, seed=seed):
                tokens.append(token)
                report(len(tokens))
        return torch.stack(tokens, 1)

    return drawing

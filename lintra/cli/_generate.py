"""`lintra generate --model DIR`."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lintra import checkpoint, generate, train
from lintra.cli._arguments import UsageError, parse
from lintra.generate import Sampler
from lintra.models import Decoder

COMPLETIONS = 3  # of each test image


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Draw or write with a trained model, token by token, as an RNN."""

    model: Path  # the folder of a run, or one of its checkpoints
    samples: int = 16  # images or sequences made from nothing
    complete: int = 8  # test images whose rest is drawn (image tasks)
    fraction: float = 0.5  # the part of them that is given, from the top
    prompt: str | None = None  # what a text goes on from
    temperature: float = 1.0  # below 1: more probable tokens, 0: the most probable one
    top_k: int | None = None  # only among the k most probable tokens
    top_p: float | None = None  # only among the fewest tokens that hold this probability
    seed: int | None = None  # the same seed, the same result
    out: Path = Path("samples.png")  # completions go to the same name with -completions

    def __post_init__(self):
        for name in ("samples", "complete"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.samples == self.complete == 0:
            raise ValueError("samples and complete are both 0: there is nothing to draw")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2^63 - 1, got {self.seed}")
        if self.out.parent.exists() and not self.out.parent.is_dir():
            raise ValueError(f"out must be in a folder, got {self.out}, where {self.out.parent} is a file")
        Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # checks them
        if self.out.suffix != ".png":
            raise ValueError(f"out must end in .png, got {self.out}")


def generate_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra generate", description=Options.__doc__ or "")
    model = checkpoint.load(options.model).eval()
    task = train.Run.around(options.model).task.build()
    if not isinstance(model, Decoder):
        raise UsageError(f"{options.model} holds a model of the task {task.name}, which draws nothing")
    if options.prompt is not None and not hasattr(task, "to_text"):
        raise UsageError(f"prompt is for tasks on text, {options.model} is of the task {task.name}")
    if hasattr(task, "to_images"):
        _images(options, model, task)
    elif hasattr(task, "to_text"):
        _text(options, model, task)
    else:
        _sequences(options, model, task)
    return 0


def _images(options: Options, model: Any, task: Any) -> None:
    from lintra import pictures

    height, width, channels = task.image_shape
    size = height * width * channels
    # Before anything is drawn: what is wrong with it is told at once.
    prompts, originals = (
        task.prompts(options.complete, options.fraction) if options.complete else (None, None)
    )
    if options.samples:
        tokens = _draw(options, model, None, size, batch=options.samples)
        pictures.samples(options.out, task.to_images(tokens), f"{options.samples} samples, drawn as an RNN")
        print(f"samples: {options.out}")
    if prompts is not None:
        repeated = prompts.repeat_interleave(COMPLETIONS, 0)
        rest = _draw(options, model, repeated, size - prompts.shape[1], batch=len(repeated))
        drawn = task.to_images(torch.cat([repeated, rest], 1)).unflatten(0, (-1, COMPLETIONS))
        rows = prompts.shape[1] // (width * channels)
        out = options.out.with_name(f"{options.out.stem}-completions.png")
        pictures.completions(out, task.to_images(originals), rows, drawn, "Test images completed as an RNN")
        print(f"completions: {out}")


def _text(options: Options, model: Any, task: Any) -> None:
    given = task.to_tokens(options.prompt or "").repeat_interleave(options.samples, 0)
    steps = task.length - given.shape[1]
    if steps < 1:
        raise UsageError(f"prompt must be shorter than the model's {task.length} bytes, got {given.shape[1]}")
    written = _draw(options, model, given, steps, batch=options.samples)
    for text in task.to_text(torch.cat([given, written], 1)):
        print(f"\n{text}")


def _sequences(options: Options, model: Any, task: Any) -> None:
    for row in _draw(options, model, None, task.length, batch=options.samples).tolist():
        print(" ".join(map(str, row)))


def _draw(options: Options, model: Any, prompt: Tensor | None, steps: int, batch: int) -> Tensor:
    """New tokens [b steps], with a bar while they come and the speed afterwards."""
    from rich.progress import track

    start = time.perf_counter()
    tokens = generate.stream(
        model,
        prompt,
        steps=steps,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        batch=batch,
    )
    drawn = torch.stack(
        list(track(tokens, "drawing", total=steps, transient=True, disable=not sys.stdout.isatty())), 1
    )
    seconds = time.perf_counter() - start
    print(f"{batch} x {steps} tokens: {seconds / batch:.3f} s each, {batch / seconds:.2f} a second")
    return drawn

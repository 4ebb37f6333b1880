"""`lintra generate --model DIR`."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor
from torch.nn import functional

from lintra import runtime
from lintra.cli import generate_text, memory
from lintra.cli.arguments import UsageError, changed, check_seed, parse
from lintra.cli.generate_text import Texts
from lintra.cli.model import Device, open_model, refuse_data, refuse_unless_images
from lintra.cli.output import Quiet
from lintra.cli.progress import progress
from lintra.cli.stopping import Stopping, stopping
from lintra.export import runtime as export
from lintra.generation import GenerationOptions, prepare_inputs, sampling
from lintra.generation.ending import NOTHING
from lintra.generation.uniforms import sequence_seed
from lintra.io.files import refuse_folder, refuse_unwritable
from lintra.models import Decoder
from lintra.native.quantize import Weights
from lintra.tasks import DataError, PixelTask, Task, check_fraction
from lintra.tasks.text import Text

COMPLETE = 8  # test images
OF_COMPLETIONS = ("completions", "fraction", "data")  # changing one of these asks for completed test images


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(GenerationOptions):
    """`GenerationOptions` as flags, without those that the command sets itself."""

    steps: Annotated[int, tyro.conf.Suppress] = 0
    batch: int = 64  # sequences at once; Ctrl-C keeps finished batches
    state_dtype: Annotated[torch.dtype | None, tyro.conf.Suppress] = None
    weights: Annotated[Weights, tyro.conf.Suppress] = "float32"  # --weights is the engine's, float16 too
    end: Annotated[int | None, tyro.conf.Suppress] = None
    stop: Annotated[Sequence[Sequence[int]], tyro.conf.Fixed, tyro.conf.Suppress] = ()  # --stop is texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Draw or write with a trained model, token by token, as an RNN."""

    model: Path = Path("mnist-small")  # folder of a run or checkpoint, or a bundled model
    samples: int = 16  # images or sequences sampled from scratch
    complete: int | tuple[Path, ...] | None = None  # number of test images, or files; else 8 if found
    completions: int = 3  # of each image
    fraction: float = 0.5  # the part of an image that is given, from the top
    prompt: str | None = None  # the beginning of a text
    length: int | None = None  # of a text, prompt included; else as trained
    stop: tuple[str, ...] = ()  # a text ends after one of these
    end: str | None = None  # a token that ends a text, such as <|endoftext|>
    stream: bool = False  # print texts as they come, one after the other
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    data: str | None = None  # file or folder of data; else that of training
    device: Device = "auto"  # auto: a GPU if there is one
    engine: Literal["pytorch", "runtime"] = "pytorch"  # runtime: the small C program, on a CPU
    weights: Literal["float32", "bfloat16", "float16", "int8"] = "float32"  # rounded copies, read faster
    out: Path = Path("samples.png")  # for images; completions: the same name with -completions
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        for name, least in (("samples", 0), ("completions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        if "" in self.stop:
            raise ValueError("stop must be texts of at least one character, got ''")
        if isinstance(self.complete, int) and self.complete < 0:
            raise ValueError(f"complete must not be negative, got {self.complete}")
        if self.samples == 0 and self.complete in (0, ()):
            raise ValueError("samples and complete are both 0: there is nothing to draw")
        if self.complete in (0, ()) and (idle := changed(self, ("completions", "fraction"))):
            raise ValueError(f"{idle[0]} is for completed images, and complete is 0")
        check_seed(self.sampling.seed)
        if self.out.suffix != ".png":
            raise ValueError(f"out must end in .png, got {self.out}")
        lacking = {"pytorch": "float16", "runtime": "bfloat16"}[self.engine]
        if self.weights == lacking:
            other = "runtime" if self.engine == "pytorch" else "pytorch"
            raise ValueError(f"weights {lacking} are for --engine {other}, got engine={self.engine!r}")
        refuse_folder("out", self.out)
        written = {x.resolve() for x in self.written}
        if isinstance(self.complete, tuple) and written & {x.resolve() for x in self.complete}:
            raise ValueError(f"out would replace an image to complete: name another file, got {self.out}")
        check_fraction(self.fraction)

    @property
    def written(self) -> list[Path]:
        """Return the pictures that may be written."""
        return [*([self.out] if self.samples else []), self.out_of_completions]

    @property
    def out_of_completions(self) -> Path:
        return self.out.with_name(f"{self.out.stem}-completions.png")


def generate_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra generate", description=Options.__doc__ or "")
    device = options.device
    if options.weights != "float32" or options.engine == "runtime":
        if device == "cuda":
            asked = f"weights={options.weights}" if options.engine == "pytorch" else "engine=runtime"
            raise UsageError(f"{asked} is for the CPU: add --device cpu")
        device = "cpu"
    opened = open_model(options.model, device, options.data)
    model, task = opened.model, opened.task
    if not isinstance(model, Decoder):
        raise UsageError(f"{options.model} is a model of the task {task.name}, and generate needs a decoder")
    for name in ("prompt", "length", "stop", "end", "stream"):
        if getattr(options, name) not in (None, (), False) and not isinstance(task, Text):
            raise UsageError(f"{name} is for tasks on text, {options.model} is of the task {task.name}")
    of_images = changed(options, ("complete", "completions", "fraction", "out"))
    refuse_unless_images(task, options.model, dict.fromkeys(of_images, True))
    if options.samples == 0 and not isinstance(task, PixelTask):
        raise UsageError("samples must be at least 1, got 0")
    drawing = Drawing(options, model)
    if isinstance(task, PixelTask):
        refuse_data(opened, options.written)
        _images(options, drawing, task)
    elif isinstance(task, Text):
        task.check(model.config)
        generate_text.write(options, drawing, task)
    else:
        _sequences(options, drawing, task)
    return drawing.exit_code


class Drawing:
    """Draw in batches, with a progress bar and the speed afterwards. Ctrl-C and SIGTERM stop it: what it
    returns are the sequences of the batches finished by then."""

    def __init__(self, options: Options, model: Decoder):
        self.options, self.model = options, model
        self.runtime = _runtime(options, model) if options.engine == "runtime" else None
        self.exit_code = 0

    def __call__(self, prompts: Tensor, steps: int, texts: Texts | None = None) -> Tensor:
        """Return what follows prompts [n t], as [n steps], -1 after the end of all texts; fewer if stopped.

        Ends the program if there are none. Checks first that memory suffices."""
        done: list[Tensor] = []
        live = texts is not None and texts.live
        batch, start, seconds = 1 if live else self.options.sampling.batch, time.perf_counter(), 0.0
        show = progress("drawing", len(prompts) * steps, "tokens", quiet=live or self.options.output.quiet)
        with show as report, stopping() as stopped:
            for number, given in enumerate(prompts.split(batch)):
                before = number * batch * steps
                report_all = lambda n, before=before: report(before + n)  # noqa: E731
                sampled = self._batch(given, steps, number * batch, report_all, stopped, texts)
                if sampled is None:
                    break
                done.append(sampled)
                seconds = time.perf_counter() - start
        self.exit_code, finished = stopped.exit_code, sum(map(len, done))
        if stopped():
            print(f"stopped: {finished:,} of {len(prompts):,} are finished", file=sys.stderr)
        if not done:
            raise SystemExit(self.exit_code)
        speed = f"{seconds / finished:.3f} s each, {finished / seconds:.2f} a second"
        most = "up to " if self.options.stop or self.options.end else ""
        if not self.options.output.quiet:
            print(f"{finished:,} x {most}{steps:,} tokens: {speed}", file=sys.stderr)
        return torch.cat(done)

    def check(self, n: int, prompt: int, steps: int) -> None:
        """Raise UsageError if n such sequences, or a batch of them, would not fit in memory."""
        memory.check_all(n, prompt + steps)
        memory.check_batch(self.model, min(self.options.sampling.batch, n), prompt, steps)

    def _batch(
        self, prompts: Tensor, steps: int, first: int, report: Any, stopped: Stopping, texts: Texts | None
    ) -> Tensor | None:
        """Return the sequences from `first` on; None if it is stopped before they end."""
        options, tokens = self.options, []
        seed = options.sampling.seed
        asked = dataclasses.replace(
            options.sampling,
            steps=steps,
            seed=None if seed is None else sequence_seed(seed, first),
            batch=len(prompts),
        )
        if self.runtime is None:
            weights: Any = options.weights
            sampled = sampling.stream(self.model, prompts, dataclasses.replace(asked, weights=weights))
        else:
            sampled = runtime.stream(self.runtime, prepare_inputs(self.model, prompts, asked))
        if texts is not None:
            texts.begin(len(prompts))
        cut = False
        for token in sampled:
            if cut := stopped():
                break
            tokens.append(token)
            report(len(tokens) * len(prompts))
            if texts is not None and texts(token.tolist()):
                break
        if texts is not None:
            texts.finish()
        if cut:
            return None
        drawn = torch.stack(tokens, 1).cpu()
        return functional.pad(drawn, (0, steps - drawn.shape[1]), value=NOTHING)


def _runtime(options: Options, model: Decoder) -> runtime.Model:
    """Load the model into the runtime. Raises UsageError where there is no runtime."""
    if reason := runtime.why_not():
        raise UsageError(f"engine=runtime cannot be used here: {reason}")
    weights: Any = options.weights
    return runtime.Model(export.to_bytes(model, weights))


def _images(options: Options, drawing: Drawing, task: PixelTask) -> None:
    from lintra import pictures

    given = _given(options, task)
    if not given and not options.samples:
        raise UsageError(
            "samples is 0, and there are no test images to complete: name some with --complete FILE"
        )
    if given:
        prompt = given[0].shape[1]
        drawing.check(len(given[0]) * options.completions, prompt, task.length - prompt)
    blank = None
    if options.samples:
        drawing.check(options.samples, 0, task.length)
        blank = task.blank(drawing.model, options.samples, options.sampling.seed)
    refuse_unwritable(options.out)  # before anything is sampled
    if blank is not None:
        sampled = task.draw(blank, drawing)
        pictures.samples(options.out, sampled, f"{len(sampled)} samples, generated as an RNN")
        print(f"samples: {options.out}")
    if given is None or drawing.exit_code:
        return
    prompts, originals = given
    sampled = task.complete(prompts, options.completions, drawing)
    whose = "Images" if isinstance(options.complete, tuple) else "Test images"
    whole = task.to_images(originals[: len(sampled)])
    out, title = options.out_of_completions, f"{whose} completed as an RNN"
    pictures.completions(out, whole, task.rows(prompts), sampled, title)
    print(f"completions: {out}")


def _given(options: Options, task: PixelTask) -> tuple[Tensor, Tensor] | None:
    """Return the parts to complete, if any, and the whole images: [n t'], [n h*w*ch]."""
    from lintra import pictures

    complete = options.complete
    if not (changed(options, OF_COMPLETIONS) or _at_hand(task) if complete is None else complete):
        return None
    if complete is None or isinstance(complete, int):
        try:
            count = min(COMPLETE, len(task.test)) if complete is None else complete
            return task.prompts(count, options.fraction)
        except DataError as error:
            raise DataError(f"{error}; --complete 0 draws without test images") from error
    files = [pictures.read(file, task.image_shape) for file in complete]
    images = task.to_tokens(torch.stack(files))
    return task.upper(images, options.fraction), images


def _at_hand(task: PixelTask) -> bool:
    """Return whether there are test images; those that cannot be read, which nobody has asked for, count as
    none."""
    try:
        return task.at_hand()
    except (DataError, OSError, RuntimeError):
        return False


def _sequences(options: Options, drawing: Drawing, task: Task) -> None:
    drawing.check(options.samples, 0, task.length)
    nothing = torch.empty(options.samples, 0, dtype=torch.int64)
    for row in drawing(nothing, task.length).tolist():
        print(" ".join(map(str, row)))

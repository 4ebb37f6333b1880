"""The whole workflow in two minutes: train on real digits in parallel, draw new ones as an RNN, measure,
look."""

import json
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lintra import checkpoint, pictures, train
from lintra.attention import linear
from lintra.bench import next_token
from lintra.bench.timing import interleaved
from lintra.checkpoint import to_json
from lintra.config import fields
from lintra.generation import sampling
from lintra.io.files import Error, read_json, write_atomically
from lintra.models import decoder
from lintra.models.decoder import Decoder
from lintra.tasks import digits

SAMPLES, COMPLETED, TIMES = 48, 8, 4  # images sampled; images completed, and how often each
GIVEN = 0.5  # the part of an image that is given to complete it
RUN = "run"  # the folder of the training run within the demo's
MARK = "demo.json"  # in it, says that the demo may replace it
PICTURES = ("samples.png", "completions.png", "loss.png", "time-per-token.png")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Train on real digits, draw new ones as an RNN, measure, and save pictures of it all."""

    dir: Path = Path("demo")  # where the pictures and the trained model go
    seconds: float = 110  # of training
    temperature: float = 1.0  # of drawing: below 1, more probable pixels
    longest: int = 1024  # position up to which the time per token is measured
    seed: int = 0  # of weights, training and drawing

    def __post_init__(self):
        fields.positive(self, "seconds")
        fields.not_negative(self, "temperature")
        fields.at_least(self, longest=32)


def run(
    config: Config, *, verbosity: train.Verbosity = "progress"
) -> tuple[list[tuple[str, str]], list[Path]]:
    """Run all steps -> the figures (what, how much) and the pictures. Replaces the output of an earlier demo.
    verbosity: how much training prints.

    Raises Error for a run or a picture in its folder that is not the demo's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(_best_threads(digits.Config()))
    try:
        return _run(config, verbosity)
    finally:
        torch.set_num_threads(threads)


def _run(config: Config, verbosity: train.Verbosity) -> tuple[list[tuple[str, str]], list[Path]]:
    task = digits.Config()
    trained = _train(config, task, verbosity)
    paths = [config.dir / name for name in PICTURES]
    samples, completions, loss, speed = paths
    model = checkpoint.load(trained.folder)
    curves = train.curves(trained.folder)
    images = task.build()
    bits = list(curves["validate_bits_per_dim"].values())[-1]
    parameters = sum(p.numel() for p in model.parameters())
    figures = [
        ("parameters", f"{parameters / 1e6:.2f} M"),
        ("trained for", f"{max(curves['validate_loss']):,} steps of {trained.train.batch} images"),
        ("validation", f"{bits:.3f} bits/dim of held-out images"),
    ]

    draw = partial(_draw, config, model)
    start = time.perf_counter()
    sampled = images.draw(images.blank(model, SAMPLES), draw)
    seconds = time.perf_counter() - start
    figures.append(("images sampled as an RNN", f"{SAMPLES / seconds:.1f} a second, {SAMPLES} at once"))
    pictures.samples(samples, sampled, f"{SAMPLES} digits sampled by an RNN")

    prompts, originals = images.prompts(COMPLETED, GIVEN)
    completed = images.complete(prompts, TIMES, draw)
    title = "Test digits, lower half sampled by an RNN"
    whole = images.to_images(originals)
    pictures.completions(completions, whole, images.rows(prompts), completed, title)

    difference = disagreement(model, originals)
    figures.append(("parallel and RNN form differ by", f"{difference:.1e} at most, of log-probabilities"))

    title = f"Training on 1,500 real digits: {bits:.3f} bits/dim in validation"
    train_curve, validate_curve = curves.get("train_loss", {}), curves["validate_loss"]
    pictures.loss_curve(loss, train_curve, validate_curve, unit="nats per symbol", title=title)

    figures += _time_per_token(config, model.config, speed)
    return figures, paths


def disagreement(model: Decoder, tokens: Tensor) -> float:
    """The largest difference between the log-probabilities of the parallel form and the RNN. tokens [b t]."""
    with torch.inference_mode():
        inputs = model.shift(tokens)
        parallel = model.output.log_probs(model(inputs))
        state, steps = model.start(len(tokens)), []
        for token in inputs.split(1, 1):
            params, state = model.extend(token, state)
            steps.append(model.output.log_probs(params))
        return float((parallel - torch.cat(steps, 1)).abs().max())


def _best_threads(task: digits.Config) -> int:
    """Return all threads or one: beside other programs, so small a network would mostly wait for the
    second."""
    data = task.build()
    model = data.model(linear.Config()).build()
    batch = data.train.__getitems__(range(task.training_preset()["batch"]))

    def step(threads: int) -> None:
        torch.set_num_threads(threads)
        data.loss(model, batch).backward()

    timings = interleaved(
        {str(n): partial(step, n) for n in (1, torch.get_num_threads())}, rounds=8, at_least=0
    )
    return int(min(timings, key=lambda threads: sum(timings[threads].seconds)))


def _train(config: Config, task: digits.Config, verbosity: train.Verbosity) -> train.Run:
    """A new run, trained for as many of the task's steps as fit into the time."""
    folder = config.dir / RUN
    model, preset = task.build().model(linear.Config()), task.training_preset()
    intervals = {"validate_every": preset["steps"] // 20, "save_every": preset["steps"]}
    limit = config.seconds / 60
    settings = train.Config(**preset, **intervals, seed=config.seed, precision="32", max_minutes=limit)
    _clear(folder)
    run = train.Run.create(folder, task=task, model=model, train=settings)
    _mark(run)
    train.fit(run, verbosity=verbosity)
    return run


def _mark(run: train.Run) -> None:
    """Say in the run's folder that the demo made it, to be trained with these settings."""
    text = json.dumps(to_json(run.train))
    write_atomically(run.folder / MARK, lambda place: place.write_text(text))


def _clear(folder: Path) -> None:
    """Remove the run of an earlier demo. Raises Error for one that is not the demo's, or was trained on, and
    without a run for a picture that the demo would replace."""
    if not (folder / "run.json").exists():
        for picture in (folder.parent / name for name in PICTURES):
            if picture.exists():
                raise Error(f"{picture} is not the demo's and is kept: take another --dir, or rename it")
        return
    run, mark = train.Run.read(folder), folder / MARK
    if not mark.exists() or to_json(run.train) != read_json(mark):
        raise Error(
            f"{folder} holds a run that is not the demo's, or was trained further since, and is kept: take "
            "another --dir, or rename it"
        )
    with run.locked():
        shutil.rmtree(folder)


def _draw(config: Config, model: Decoder, prompts: Tensor, steps: int) -> Tensor:
    """Generate what follows the prompts."""
    return sampling.generate(model, prompts, steps=steps, temperature=config.temperature, seed=config.seed)


def _time_per_token(config: Config, model: decoder.Config, path: Path) -> list[tuple[str, str]]:
    """Measures networks of the trained one's size on longer sequences, draws the picture -> figures."""
    positions = tuple(2**i for i in range(4, 20) if 2**i <= config.longest)
    sizes = next_token.Sizes(
        layers=model.layers, heads=model.heads, width=model.width, positions=positions, rounds=5
    )
    _, timings = next_token.run(sizes, lambda done: None)
    lines = next_token.milliseconds(timings, sizes)
    pictures.time_per_token(path, positions, lines, "One more token: the RNN's time does not grow")
    rnn, exact = lines[next_token.RNN][-1], lines[next_token.RECOMPUTED][-1]
    return [
        (f"token {positions[-1]:,}, {next_token.RNN}", f"{rnn:.2f} ms"),
        (
            f"token {positions[-1]:,}, {next_token.RECOMPUTED}",
            f"{exact:.2f} ms, {exact / rnn:.0f} times as long",
        ),
    ]

"""`lintra train TASK` and `lintra train --resume DIR`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lintra import attention, tasks, train
from lintra.checkpoint import from_json, step_of, to_json
from lintra.cli import memory, settings
from lintra.cli.arguments import UsageError, parse, parse_known
from lintra.cli.mechanism import mechanism
from lintra.cli.model import chosen
from lintra.cli.output import Output
from lintra.cli.progress import progress
from lintra.io.files import expanded
from lintra.models import ctc
from lintra.train.config import Strategy, Verbosity
from lintra.train.data_checks import check_begun, check_room
from lintra.train.file_copies import beside
from lintra.train.launch import is_first_process, launcher
from lintra.train.optimizer import optimizer
from lintra.train.run import RUN, first_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Changes to the task's own network; None leaves it as the task has it."""

    dir: Path | None = None  # the run's folder; else runs/TASK
    config: Path | None = None  # settings instead of the task's: run.json, YAML
    attention: str = "linear"  # of `lintra list`; A,A,B: one per layer
    attention_options: tuple[str, ...] = ()  # FIELD=VALUE ... or A.FIELD=VALUE ...
    paper_block: bool = False  # norms, MLP and positions of its paper
    layers: int | None = None  # blocks; else the task's own, like the next four
    heads: int | None = None  # heads of attention
    head_dim: int | None = None  # numbers of a head; else width / heads
    width: int | None = None  # features of a token
    dropout: float | None = None  # part of the activations set to 0 in training
    tie_embeddings: bool = False  # predict symbols by their input vectors
    alternating: bool = False  # causal layers, every second from the end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume:
    resume: Path  # the folder of the run to resume
    steps: int | None = None  # train to this step instead
    max_minutes: float | None = None  # stop after so many minutes, instead of as before
    lr: float | None = None  # the schedule's highest learning rate from now on
    nodes: int | None = None  # machines from now on
    devices: int | None = None  # processes or GPUs of each from now on
    strategy: Strategy | None = None  # how they share a batch from now on
    accumulate: int | None = None  # parts of each share of a batch from now on
    checkpoint_blocks: bool = False  # recompute blocks in backward from now on
    save_every: int | None = None  # steps from checkpoint to checkpoint from now on
    timeout: float | None = None  # seconds to wait for other processes from now on
    wandb: str | None = None  # a project of Weights & Biases to log to from now on
    output: Output = dataclasses.field(default_factory=Output)


_SIZES = ("layers", "heads", "head_dim", "width", "dropout")
_SWITCHES = ("tie_embeddings", "alternating")
_CHANGEABLE = tuple(x.name for x in dataclasses.fields(Resume) if x.name not in ("resume", "output"))


def train_command(args: Sequence[str]) -> int:
    flags = {arg.partition("=")[0] for arg in args}
    if not args or args[0] in ("-h", "--help"):
        _print_help()
    elif "--device" in flags:
        raise UsageError(
            "train has no --device: it takes GPUs if there are any, as many as --devices says; with "
            "CUDA_VISIBLE_DEVICES= before the command it trains on the CPU"
        )
    elif "--resume" in flags:
        _resume(args)
    elif (name := args[0].replace("_", "-")) in _names():
        new = _new_run(name, args[1:])
        from lintra.train.loop import fit_checked  # Lightning, which takes seconds: not if flags are wrong

        fit_checked(*new)
    else:
        raise UsageError(f"task must be one of {', '.join(_names())}; got {args[0]!r}")
    return 0


def _resume(args: Sequence[str]) -> None:
    """Train the run that these flags of --resume name, with the settings that they change."""
    _refuse_settings(args)
    options = parse(Resume, args, prog="lintra train", description="Resume a run.")
    changes = {name: getattr(options, name) for name in _CHANGEABLE}
    changes["checkpoint_blocks"] = options.checkpoint_blocks or None
    _check_logger(options.wandb)
    with train.Run.read(options.resume).locked():
        run = train.Run.read(options.resume)  # which a process that had the lock may have changed
        nodes = options.nodes or (launcher() or run.train).nodes or 1
        if options.devices == nodes == 1:  # no other process shares the batch
            changes["strategy"] = options.strategy or "auto"
        done = run.checkpoints()
        if options.steps is not None and done and step_of(done[-1]) > options.steps:
            raise UsageError(f"steps must be at least those of {done[-1]}, got {options.steps}")
        of_launcher = {} if launcher() is None else {"nodes": None, "devices": None}  # not those of before
        _refuse_moved(run)
        verbosity = options.output.verbosity
        task = _watched(run.task, verbosity)
        given = of_launcher | _given(changes)
        settings = dataclasses.replace(run.train, **given)
        settings.check_batch(task.batch_tokens, task.batch)
        check_room(task, run.model, settings, torch.device(chosen("auto")))
        if given and is_first_process():
            check_begun(run, task)
        run = run.changed(**given)
        from lintra.train.loop import fit_locked  # Lightning, as above

        fit_locked(run, task, verbosity)


def _check_logger(wandb: str | None) -> None:
    if wandb is not None:
        from lintra.train.logs import check_wandb  # Lightning, as above

        check_wandb()


def _refuse_settings(args: Sequence[str]) -> None:
    """Raise UsageError if a flag is a setting that a run keeps, or a task precedes --resume."""
    if not args[0].startswith("-"):
        raise UsageError(f"the run knows its task: leave {args[0]!r} out before --resume")
    kept = {field.name for form in (Model, train.Config) for field in dataclasses.fields(form)}
    for arg in args:
        flag = arg.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in kept - set(_CHANGEABLE):
            can = ", ".join(f"--{each.replace('_', '-')}" for each in _CHANGEABLE)
            raise UsageError(
                f"a run keeps its {name}, and --resume changes only {can}: leave {flag} out, or begin a new "
                "run, with --start-from DIR from the weights of this one"
            )


def _refuse_moved(run: train.Run) -> None:
    """Raise UsageError if data that the run reads has moved: no flag says where it is now."""
    for name in run.task.PATHS:
        place = getattr(run.task, name)
        made = name == "cache"  # created if there is none
        if place is not None and not made and not expanded(place).exists():
            file = run.folder / RUN
            raise UsageError(f"{name} {place} does not exist: put it back, or say in {file} where it is now")


def _names() -> list[str]:
    """Return the names of the tasks, as written on the command line."""
    return [name.replace("_", "-") for name in tasks.names()]


def _print_help() -> None:
    names = _names()
    wide = max(map(len, names)) + 1
    print("Train a model: lintra train TASK [--flag value ...]\n")
    for name in names:
        print(f"  {name:<{wide}}{tasks.load(name).Config.__doc__}")
    print(f"\n  {'lintra train TASK --help':<28}the flags of a task")
    print(f"  {'lintra train --resume DIR':<28}resume a run (--steps, --max-minutes, --lr, ...)")


def _new_run(name: str, args: Sequence[str]) -> tuple[train.Run, tasks.Task, Verbosity]:
    """The run these flags describe, its folder claimed, its task, its data read, and what is to be said."""
    task = tasks.load(name)
    network, defaults = _defaults(task.Config, args)
    fields = [(part, type(default), default) for part, default in defaults.items()]
    form = dataclasses.make_dataclass("Arguments", fields, frozen=True)
    options: Any = parse(form, args, prog=f"lintra train {name}", description=task.Config.__doc__ or "")
    problem = _watched(options.task, options.output.verbosity)
    asked = {arg.partition("=")[0].replace("_", "-") for arg in args}
    if problem.batch_tokens is not None and "--batch" in asked:
        raise UsageError("batch is in frames here: use --batch-frames instead")
    if problem.batch is not None and "--batch" in asked:
        raise UsageError("batch and batch_tokens both say how large a step is: leave one of them out")
    for flag, schedule in (("--drop-at", "step"), ("--patience", "plateau")):
        if flag in asked and options.train.schedule != schedule:
            name = flag.removeprefix("--").replace("-", "_")
            raise UsageError(f"{name} is for --schedule {schedule}, got {options.train.schedule}")
    options.train.check_batch(problem.batch_tokens, problem.batch)
    _check_logger(options.train.wandb)
    _ = problem.train  # reads the data: if there is none, no folder is claimed
    own, kind = network, None
    if network is None or options.model.attention_options or options.model.attention != _attention(network):
        kind = mechanism(options.model.attention, options.model.attention_options, problem.length)
        own = network or problem.model(kind[0] if isinstance(kind, tuple) else kind)
    changes = {name: getattr(options.model, name) for name in _SIZES}
    changes |= {name: getattr(options.model, name) or None for name in _SWITCHES}
    if network is not None or isinstance(kind, tuple):  # the task's own layers need not be a multiple of them
        changes["attention"] = kind
    if options.model.paper_block and "," in options.model.attention:
        raise UsageError("paper_block is the block of one mechanism, attention has several: leave it out")
    model = _changed(_with_paper_block(own, kind) if options.model.paper_block else own, _given(changes))
    problem.check(model)
    if options.train.strategy != "fsdp":  # which shards the model
        memory.check_training(_weights(model), torch.device(chosen("auto")))
    check_room(problem, model, options.train, torch.device(chosen("auto")))
    if options.train.start_from is not None:
        first_model(model, options.train, options.task)
    with torch.device("meta"):
        optimizer(model.build(), options.train)  # as with the data: an impossible model claims no folder
    folder = options.model.dir or Path("runs") / name
    run = train.Run.create(folder, task=options.task, model=model, train=options.train)
    return run, problem, options.output.verbosity


def _defaults(task: Any, args: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the network of --config, if any, and the defaults of all flags: those of --config, else the
    task's. Raises UsageError, and Error for a damaged file."""
    file = parse_known(Model, args).config
    written, saved = ({}, False) if file is None else settings.read(file)
    try:
        own = from_json(task, {**to_json(task()), **written.get("task", {})}, "task")
        own = own if file is None else beside(own, file)
        preset = to_json(train.Config(**parse_known(task, args, own).training_preset()))
        training = from_json(train.Config, {**preset, **written.get("train", {})}, "train")
        network = settings.model(written["model"], saved=saved) if "model" in written else None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from error
    shape = Model() if network is None else Model(attention=_attention(network))
    return network, {"model": shape, "task": own, "train": training, "output": Output()}


def _attention(network: Any) -> str:
    """Return the names of the mechanisms in a network's configuration, as the flag takes them; where it has
    none, the flag's default."""
    configs = getattr(getattr(network, "encoder", network), "mechanisms", ())
    return ",".join(attention.name_of(type(each)) or "" for each in configs) or Model.attention


def _watched(config: Any, verbosity: Verbosity) -> tasks.Task:
    """The task, which shows how far it is where reading its data takes long; the first process for all."""
    task = config.build()
    if is_first_process() and verbosity != "result":
        task.watch = progress
    return task


def _changed(model: Any, changes: dict[str, Any]) -> Any:
    """Return a model's configuration with another shape; for a recogniser, its encoder's.

    Raises UsageError for a setting that it does not have.
    """
    if isinstance(model, ctc.Config):
        encoder = _changed(model.encoder, changes)
        if model.subsample > 1:  # convolutions as wide as the layer they feed
            encoder = dataclasses.replace(encoder, inputs=encoder.width)
        return dataclasses.replace(model, encoder=encoder)
    own = {field.name for field in dataclasses.fields(model)}
    for name in changes:
        if name not in own:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"this model has no {name}: leave {flag} out")
    return dataclasses.replace(model, **changes)


def _with_paper_block(model: Any, config: Any) -> Any:
    """Return a model's configuration with blocks as in the paper of `config`, its mechanism to be; None: the
    one that it has.

    Raises UsageError for a mechanism that names none."""
    config = config or getattr(model.encoder if isinstance(model, ctc.Config) else model, "attention", None)
    name = attention.name_of(type(config))
    kind = None if name is None else attention.mechanism(name)
    if kind is None or not kind.paper_block:
        having = ", ".join(name for name in attention.names() if attention.mechanism(name).paper_block)
        raise UsageError(f"paper_block is for {having}: leave --paper-block out")
    return _changed(model, {**kind.paper_block, "grid": (), "max_length": None})  # of other positions


def _weights(model: Any) -> int:
    """Return how many numbers a model of this configuration has to learn, extrapolated to its layers from two
    and three repetitions of its mechanisms: each adds the same number. Raises UsageError where it cannot be
    built."""
    body, counts = model.encoder if isinstance(model, ctc.Config) else model, []
    period = len(getattr(body, "mechanisms", (None,)))
    for layers in (2 * period, 3 * period):  # an alternating encoder needs two repetitions
        try:
            with torch.device("meta"):
                built = _changed(model, {"layers": layers}).build()
        except (RuntimeError, OverflowError, TypeError) as error:  # PyTorch's, its calls in the lines below
            raise UsageError(f"the model cannot be built: {error}".splitlines()[0]) from error
        counts.append(sum(x.numel() for x in built.parameters()))
    return counts[0] + (body.layers // period - 2) * (counts[1] - counts[0])


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}

"""A model on disk: config.json, with a format version, beside model.safetensors. Nothing is pickled.

{"format": 2, "model": "decoder", "config": {"vocabulary": 256, "attention": {"name": "linear", ...}, ...}}
"""

import dataclasses
import hashlib
import json
import typing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lintra import attention, legacy, models
from lintra.attention import AttentionConfig, FeatureMap, State
from lintra.config import fields, registry
from lintra.io.files import Error, expanded, read_json, write_atomically
from lintra.io.shards import files_of, read_whole
from lintra.io.tensors import is_part, read_tensors, write_tensors
from lintra.models import Model

FORMAT = 2
_COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (type(None), int, float, str, tuple, list, dict)  # JSON has them, and of numpy.float64 a float
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SHIPPED = Path(__file__).parent / "weights"  # trained models that come with the library, a folder each


def save(model: Model, folder: str | Path, *, stored: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors into a new `folder`, or in place of a model that is there.

    stored: the type of the numbers in the file, such as torch.float16, for a model that computes in float32
    and will again when it is loaded; None: as they are. Large files come in parts (`lintra.io.tensors`).
    The folder appears complete or not at all: what was there before survives a full disk or a killed
    process. Raises Error where `folder` holds something that is not a model of lintra, ValueError where the
    weights do not fit into `stored` or it is no floating type, TypeError for what `load` could not make.
    """
    if not isinstance(model, Model) or _foreign(type(model)):
        raise TypeError(
            f"model must be a network of lintra.models, got {type(model).__name__}: save what it wraps, or "
            "the state_dict of a network of your own"
        )
    refuse_foreign(model.config, "model.config")
    if mixed := _mixed(dict(model.named_parameters())):
        raise TypeError(f"model must have weights of one type, got {mixed}: call model.to(dtype) first")
    folder = Path(folder)
    refuse_others(folder)
    write_atomically(folder, lambda place: write_model(model, place, stored))


def refuse_foreign(config: Any, where: str) -> None:
    """Raise TypeError that names the place for a configuration with a class in it that is not lintra's: a
    model saved with it could not be loaded again."""
    if isinstance(config, tuple | list):
        for i, part in enumerate(config):
            refuse_foreign(part, f"{where}[{i}]")
    if isinstance(config, _PLAIN):
        return
    kind = type(config)
    if _foreign(kind) and attention.name_of(kind) is None:
        raise TypeError(
            f"{where} is a {kind.__qualname__} of {kind.__module__}, which no saved model can be made of "
            "again: call a mechanism's Config, in a module of its own (docs/adding.md), or save a state_dict"
        )
    for field in dataclasses.fields(config):
        refuse_foreign(getattr(config, field.name), f"{where}.{field.name}")


def refuse_others(folder: Path, *more: str) -> None:
    """Raise Error for a folder that holds anything but a saved model and files called as one of `more`."""

    def ours(name: str) -> bool:
        return name in (CONFIG, *more) or is_part(name, folder / WEIGHTS)

    if not folder.exists():
        return
    names = {x.name for x in folder.iterdir()} - {".DS_Store"} if folder.is_dir() else {""}
    if names and not (all(map(ours, names)) and _is_ours(folder / CONFIG)):
        raise Error(f"{folder} exists and is not a saved model: choose another folder")


def write_model(model: Model, folder: Path, stored: torch.dtype | None = None) -> None:
    """Write the files of a model into `folder`, which is made if it is not there. See `save`."""
    if stored is not None and not stored.is_floating_point:
        raise ValueError(f"stored must be a floating type, as weights are, got {stored}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors, more = model.state_dict(), {}
    if stored is not None:
        more["dtype"] = "float32"  # that of the model; the file records its own
        tensors = {name: _narrow(name, x, stored) for name, x in tensors.items()}
    (folder / CONFIG).write_text(describe_model(model.config, **more))
    write_tensors(tensors, folder / WEIGHTS)


def describe_model(config: Any, **more: Any) -> str:
    """Return the text of config.json for a model of this configuration."""
    name = type(config).__module__.rpartition(".")[2]
    content = {"format": FORMAT, "model": name, "config": to_json(config), **more}
    return json.dumps(content, indent=2) + "\n"


def load(folder: str | Path, device: str | torch.device = "cpu") -> Any:
    """Load the model in `folder`, of any kind, in evaluation mode; of a training run, its newest checkpoint.

    The name of a model that comes with the library, such as "mnist-small", stands for its folder.
    Raises Error if anything is missing, damaged, of another format or does not fit its configuration,
    ValueError for a device that is not there.
    """
    return load_from(folder, device)[0]


def load_from(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Any, Path]:
    """Load a model as `load` does -> the model and the folder that has its weights: of a run that is being
    trained, the checkpoint that was the newest. Raises as `load` does."""
    _check_device(device)
    found = newest(Path(folder))
    while True:
        try:
            return _load(found, device), found
        except Error:
            if (newer := newest(Path(folder))) == found:
                raise
            found = newer  # the training has dropped the other one meanwhile


def _load(folder: Path, device: str | torch.device) -> Any:
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict) or "format" not in content:
        raise Error(f"{folder / CONFIG} is not a lintra model: it has no format version")
    check_format(content["format"], folder / CONFIG)
    old = content["format"] == legacy.FORMAT
    try:
        module = registry.load(models, content.get("model", ""), "model")
        described = content.get("config")
        config = from_json(module.Config, legacy.upgrade_config(described) if old else described, "config")
        tensors = read_whole(folder, "model", device)
        tensors = legacy.upgrade_tensors(tensors) if old else tensors
        if "dtype" in content:
            tensors = {name: _widen(x, content["dtype"]) for name, x in tensors.items()}
        return with_weights(config, tensors, folder / WEIGHTS).eval()
    except Error:
        raise
    except (ValueError, TypeError) as error:
        raise Error(f"{folder / CONFIG}: {error}") from error


def check_format(found: Any, file: Path) -> None:
    """Raise Error unless `found`, the format of a file, is one that this version reads."""
    if type(found) is not int or found not in (legacy.FORMAT, FORMAT):
        raise Error(
            f"{file} has format {fields.shown(found)}, this lintra reads formats {legacy.FORMAT} and {FORMAT}"
        )


def _check_device(device: str | torch.device) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(
            f"device must be one of PyTorch's, such as 'cpu' or 'cuda', got {device!r}"
        ) from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but PyTorch finds no CUDA device here")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device is {str(device)!r}, which PyTorch cannot use here: {reason}") from error


def with_weights(config: Any, tensors: dict[str, torch.Tensor], file: Path) -> Any:
    """Build the model of a configuration with these tensors as its weights; none are initialised first.

    Raises Error, which names `file`, for a missing or unknown tensor, one of another shape, weights of
    several types and types in which nothing is computed; ValueError for sizes that no tensor can have.
    """
    layers = sum(getattr(x, "layers", 0) for x in (config, getattr(config, "encoder", None)))
    if layers > len(tensors):  # found out before so many are built
        raise Error(f"{file} has {len(tensors):,} tensors, too few for {layers:,} layers")
    try:
        with torch.device("meta"):
            model = config.build()
    except (RuntimeError, OverflowError, TypeError) as error:  # PyTorch's, with its calls in the lines below
        raise ValueError(f"the model cannot be built: {error}".splitlines()[0]) from error
    wanted = model.state_dict()
    for problem, names in (("lacks", wanted.keys() - tensors), ("has the unknown", tensors.keys() - wanted)):
        if names:
            raise Error(f"{file} {problem} tensor {min(names)!r}")
    for name, x in wanted.items():
        got = tensors[name]
        if got.shape != x.shape or got.is_floating_point() != x.is_floating_point():
            raise Error(
                f"{file}: {name} must be {x.dtype} {list(x.shape)}, got {got.dtype} {list(got.shape)}"
            )
        if got.is_floating_point() and got.dtype not in _COMPUTED:
            raise Error(f"{file}: {name} is {got.dtype}, in which no model computes: convert it to float32")
    if mixed := _mixed({name: tensors[name] for name, _ in model.named_parameters()}):
        raise Error(
            f"{file} must hold weights of one type, got {mixed}: convert them to one, such as float32"
        )
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(True)


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] != __package__


def _mixed(weights: dict[str, torch.Tensor]) -> str:
    """Two weights of different types, in words; empty where all are of one."""
    kinds = {x.dtype: name for name, x in weights.items() if x.is_floating_point()}
    first = [f"{name} of {dtype}" for dtype, name in kinds.items()][:2]
    return " and ".join(first) if len(kinds) > 1 else ""


def find(model: str | Path) -> Path:
    """The folder of that name; if it holds no model, that of the model of that name that comes with the
    library, if there is one."""
    folder = expanded(model)
    holds = (folder / CONFIG).exists() or checkpoints(folder)
    return SHIPPED / folder if not holds and str(model) in shipped() else folder


def shipped() -> list[str]:
    """The names of the models that come with the library."""
    return sorted(x.parent.name for x in SHIPPED.glob(f"*/{CONFIG}"))


def newest(folder: Path) -> Path:
    """`folder` if it holds a model, else its newest `step-*` folder. Raises Error if there is neither."""
    folder = find(folder)
    if not folder.is_dir():
        raise Error(
            f"{folder} does not exist or is not a folder; models that come with lintra: "
            f"{', '.join(shipped())}"
        )
    if (folder / CONFIG).exists():
        return folder
    steps = checkpoints(folder)
    if not steps:
        raise Error(f"{folder} holds no model: there is no {CONFIG} in it and no step-* folder with one")
    return steps[-1]


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, the oldest first."""
    steps = [x for x in run.glob("step-*") if (x / CONFIG).exists() and x.name[len("step-") :].isdigit()]
    return sorted(steps, key=step_of)


def digest(model: str | Path) -> str:
    """Return a SHA-256 of the files of a model's weights, given its folder or that of its run, newest
    checkpoint. Raises Error."""
    found = hashlib.sha256()
    for file in files_of(newest(Path(model)), "model"):
        with file.open("rb") as content:
            while part := content.read(2**20):
                found.update(part)
    return found.hexdigest()


def step_of(folder: Path) -> int:
    """The step of the checkpoint in a folder step-00001200."""
    return int(folder.name.removeprefix("step-"))


def save_state(state: State, file: str | Path) -> None:
    """Write a state of generation to one safetensors file, to be resumed elsewhere. Atomic."""
    # Copies: those of a state may share memory, which safetensors refuses.
    leaves = enumerate(attention.leaves(state))
    tensors = {str(i): x.clone(memory_format=torch.contiguous_format) for i, x in leaves}
    write_atomically(Path(file), lambda place: save_file(tensors, place))


def load_state(like: State, file: str | Path) -> State:
    """Load the state in `file`, of the form of `like`, such as `model.start(batch)`. Raises Error if it is
    not."""
    wanted = list(attention.leaves(like))
    tensors = read_tensors(Path(file), wanted[0].device if wanted else "cpu")
    if tensors.keys() != {str(i) for i in range(len(wanted))}:
        raise Error(f"{file} holds {len(tensors)} tensors, a state of this model {len(wanted)}")
    values = iter(tensors[str(i)] for i in range(len(wanted)))

    def take(x: torch.Tensor) -> torch.Tensor:
        value = next(values)
        # The axis of time may have grown; it is the one of length 0 in a fresh cache.
        fits = value.dim() == x.dim() and all(n in (m, 0) for n, m in zip(x.shape, value.shape, strict=True))
        dtypes = {x.dtype}
        if x.is_floating_point():
            dtypes.add(torch.bfloat16)  # sums that `generation.cast_state` has narrowed
            if not x.numel():
                dtypes.add(torch.float16)  # a cache has the dtype of its tokens, which autocast decides
        if not fits or value.dtype not in dtypes:
            raise Error(
                f"{file} has a tensor {list(value.shape)} of {value.dtype} where this model's state has "
                f"{list(x.shape)} of {x.dtype}"
            )
        return value

    return attention.map_state(take, like)


def to_json(value: Any) -> Any:
    """A configuration as JSON: a dataclass becomes an object, with its `name` where there is a choice."""
    if isinstance(value, tuple):
        return tuple(map(to_json, value))
    if not dataclasses.is_dataclass(value):
        return value
    content = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"name": _key(type(value)), **content}


def from_json(kind: Any, content: Any, where: str, *, saved: bool = True) -> Any:
    """Build a configuration, one of `kind`, from the form of `to_json`, checked against the fields' types.

    Raises ValueError that names the place, which begins with `where`.

    saved: whether a program wrote it, with all fields, and not a user, who leaves those out that keep their
    defaults. A field that a saved file lacks is newer than the file: a class gives in ABSENT what it was
    then, where that is not its default.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be an object, got {fields.shown(content)}")
    content = dict(content)
    kind = _choose(kind, content.pop("name", None), where)
    content = {**(getattr(kind, "ABSENT", {}) if saved else {}), **content}
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise ValueError(
            f"{where} has the unknown field {fields.shown(unknown[0])}; the fields are {', '.join(known)}"
        )
    for field in dataclasses.fields(kind):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if needed and field.name not in content:
            raise ValueError(f"{where} lacks the field {field.name!r}")
    values = {name: _value(known[name], x, f"{where}.{name}", saved) for name, x in content.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _value(hint: Any, content: Any, where: str, saved: bool) -> Any:
    options = fields.options(hint)
    if isinstance(content, list | tuple) and tuple[AttentionConfig, ...] in options:
        return tuple(
            from_json(AttentionConfig, x, f"{where}[{i}]", saved=saved) for i, x in enumerate(content)
        )
    if any(dataclasses.is_dataclass(x) or x in (AttentionConfig, FeatureMap) for x in options):
        return from_json(hint, content, where, saved=saved)
    content = _tuples(content)
    if isinstance(content, int) and any(str(content) in typing.get_args(option) for option in options):
        content = str(content)  # a choice such as "32", which YAML without quotes reads as a number
    if not fields.fits(hint, content):
        raise ValueError(f"{where} must be {fields.describe(hint)}, got {fields.shown(content)}")
    return content


def _tuples(content: Any) -> Any:
    """The lists of JSON, which has no tuples, as tuples."""
    return tuple(map(_tuples, content)) if isinstance(content, list) else content


def _key(kind: type) -> str:
    """The name of a class among its kind: the file of a mechanism, else the class itself."""
    if kind.__name__ != "Config":
        return kind.__name__
    last = kind.__module__.rpartition(".")[2]
    return (attention.name_of(kind) or last) if _foreign(kind) else last


def _choose(kind: Any, name: str | None, where: str) -> type:
    if AttentionConfig in fields.options(kind):
        return attention.load(str(name)).Config
    options = tuple(FeatureMap.__subclasses__()) if kind is FeatureMap else fields.options(kind)
    for option in options:
        if name == _key(option):
            return option
    raise ValueError(f"{where} must be one of {', '.join(map(_key, options))}, got {fields.shown(name)}")


def _is_ours(file: Path) -> bool:
    """Return whether a config.json is that of a lintra model: other programs have files of the same
    names."""
    try:
        content = read_json(file)
    except Error:
        return False
    return isinstance(content, dict) and {"format", "model"} <= content.keys()


def _narrow(name: str, x: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    if x.dtype != torch.float32:
        raise ValueError(f"stored={stored} is for models in float32, and {name} is {x.dtype}")
    if bool((x.isfinite() & (x.abs() > torch.finfo(stored).max)).any()):
        raise ValueError(f"{name} has numbers too large for stored={stored}")
    return x.to(stored)


def _widen(x: torch.Tensor, dtype: Any) -> torch.Tensor:
    if dtype != "float32":
        raise ValueError(f"dtype must be 'float32' or absent, got {fields.shown(dtype)}")
    return x.float() if x.is_floating_point() else x

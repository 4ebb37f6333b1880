"""Tensors in shards: safetensors files that several processes wrote together, each its part of every tensor.

torch.distributed.checkpoint writes and reads them (`HuggingFaceStorageWriter`), by as many processes as there
are then; nothing is pickled. shards.json beside them lists what belongs together, so that a file that is
missing or cut short is noticed:

{"format": 2, "files": {"shard-00001-...safetensors": 1200}, "tensors": {"model": {"head.bias": ["float32",
[17]]}, "training": {}}}
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lintra.io.files import Error, read_json
from lintra.io.tensors import read_tensors

SHARDS = "shards.json"
Part = Literal["model", "training"]
_FORMAT = 2


def index(files: Mapping[str, int], tensors: Mapping[Part, Mapping[str, Tensor]]) -> str:
    """Return the text of shards.json: the bytes of each file, and the tensors of each part."""
    described = {
        part: {name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in own.items()}
        for part, own in tensors.items()
    }
    return json.dumps({"format": _FORMAT, "files": dict(files), "tensors": described}) + "\n"


def describe(folder: Path, part: Part) -> dict[str, Tensor]:
    """Return the tensors that a folder holds, in shards or in one file, on the device "meta".

    Raises Error that names the file that is missing, cut short or damaged."""
    if not (folder / SHARDS).exists():
        return read_tensors(folder / f"{part}.safetensors", "meta")
    file = folder / SHARDS
    content = read_json(file)
    if isinstance(content, dict) and content.get("format") != _FORMAT:
        raise Error(f"{file} has format {content.get('format')!r}, this lintra reads format {_FORMAT}")
    try:
        files = {str(name): int(size) for name, size in content["files"].items()}
        tensors = {str(name): _empty(*form) for name, form in content["tensors"][part].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Error(f"{file} does not say which shards and tensors there are") from error
    for name, size in files.items():
        _check(folder / name, size)
    return tensors


def read_whole(folder: Path, part: Part, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of a folder, in shards or in one file. Raises Error as `describe` does."""
    if not (folder / SHARDS).exists():
        return read_tensors(folder / f"{part}.safetensors", device)
    tensors = {name: torch.empty_like(x, device=device) for name, x in describe(folder, part).items()}
    read_into(folder, tensors)
    return tensors


def files_of(folder: Path, part: Part) -> list[Path]:
    """Return the files of a folder that hold tensors of a part, by name. Raises Error as `describe` does, and
    where there is none."""
    if not (folder / SHARDS).exists():
        found = folder.glob(f"{part}*.safetensors")
    else:
        names = describe(folder, part).keys()
        found = (file for file in folder.glob("shard-*.safetensors") if names & _names(file))
    files = sorted(found)
    if not files:
        raise Error(f"{folder} holds no tensors of the {part}")
    return files


def read_into(folder: Path, tensors: dict[str, Tensor], group: Any = None) -> None:
    """Fill tensors by those of the same names in a folder, in shards or not; a DTensor with what it holds.

    group: of the processes that read together, each its own part; None: this process reads alone. Raises
    Error, on all of them."""
    check_engine()
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose, where it is
            load(
                tensors,
                storage_reader=HuggingFaceStorageReader(str(folder)),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise Error(f"{folder} cannot be read: {reason(error)}") from error


def check_engine() -> None:
    """Raise Error where PyTorch is too old to shard safetensors."""
    try:
        from torch.distributed.checkpoint import hf_storage  # noqa: F401
        from torch.distributed.checkpoint.staging import DefaultStager  # noqa: F401
    except ImportError as error:
        raise Error(
            f"shards are written and read by newer versions of PyTorch, such as 2.13, and this is "
            f"{torch.__version__}: install another"
        ) from error


def reason(error: Any) -> str:
    """Return what went wrong first where processes wrote or read together, in a line."""
    first = min(error.failures)
    return " ".join(str(error.failures[first][0]).split())


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _names(file: Path) -> set[str]:
    with safe_open(file, "pt") as content:
        return set(content.keys())


def _check(file: Path, size: int) -> None:
    """Raise Error unless a shard has its original length and describes its content."""
    try:
        found = os.stat(file).st_size
        if found != size:
            raise ValueError(f"it has {found:,} bytes and was written with {size:,}")
        with safe_open(file, "pt"):
            pass
    except (OSError, ValueError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise Error(
            f"{file}, a shard of this checkpoint, cannot be read: {why}; copy it from where it is whole, "
            "or remove its folder to go back to the checkpoint before"
        ) from error

"""Named tensors on disk: one safetensors file, or several where it would be large. Nothing is pickled.

model.safetensors becomes model-00001-of-00003.safetensors and so on, with model.safetensors.index.json saying
which tensor is where: the names and the index are Hugging Face's, so that other programs read them too.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lintra.io.files import Error, read_json, refuse_irregular

PART = 14 * 2**20  # bytes of tensors in a file: under 15 MB, which mail, version control and devices take
_INDEX = ".index.json"


def write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write `file`, or parts of it of at most PART bytes beside it; a larger tensor has its own."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, x in tensors.items():
        size += x.nbytes
        if parts[-1] and size > PART:
            parts.append({})
            size = x.nbytes
        parts[-1][name] = x.contiguous()
    if len(parts) == 1:
        save_file(parts[0], file)
        return
    places = {}
    for i, part in enumerate(parts, 1):
        name = f"{file.stem}-{i:05d}-of-{len(parts):05d}{file.suffix}"
        save_file(part, file.with_name(name))
        places |= dict.fromkeys(part, name)
    total = sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    file.with_name(file.name + _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_tensors(file: Path, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """The tensors of `file` or of its parts; on the device "meta" their shapes and types alone. Raises Error
    with the name of the file that is wrong."""
    index = file.with_name(file.name + _INDEX)
    if file.exists() or not index.exists():
        return _read(file, device)
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(is_part(name, file) for name in places.values()):
        raise Error(f"{index} does not say in which parts of {file.name} the tensors are")
    tensors = {}
    for name in sorted(set(places.values())):
        tensors |= _read(file.with_name(name), device)
    if lacking := places.keys() - tensors:
        raise Error(f"{file.with_name(places[min(lacking)])} lacks tensor {min(lacking)!r}")
    return tensors


def is_part(name: Any, file: Path) -> bool:
    """Return whether this is the name of a part of `file`, of its index or of itself."""
    if name in (file.name, file.name + _INDEX):
        return True
    pattern = rf"{re.escape(file.stem)}-\d{{5}}-of-\d{{5}}{re.escape(file.suffix)}"
    return isinstance(name, str) and re.fullmatch(pattern, name) is not None


def _read(file: Path, device: str | torch.device) -> dict[str, Tensor]:
    refuse_irregular(file)
    meta = str(device) == "meta"  # unknown to safetensors: the file is mapped, and none of it is read
    try:
        with safe_open(file, framework="pt", device="cpu" if meta else str(device)) as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 (no mapping)
            return {name: x.to(device) for name, x in tensors.items()} if meta else tensors
    except FileNotFoundError as error:
        raise Error(f"{file} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise Error(f"{file} is damaged or not a safetensors file: {error}") from error

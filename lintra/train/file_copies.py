"""Files that a run keeps a copy of, beside run.json, so that its checkpoints can be used without the
originals.

A task's `Config` names them in COPIES. run.json has their names and, as "copies", their SHA-256.
"""

import dataclasses
from hashlib import sha256
from pathlib import Path
from typing import Any

from lintra.io.files import Error, expanded, refuse_irregular, write_atomically

Sums = dict[str, str]  # field of the task -> SHA-256 of its copy


def copied(task: Any) -> dict[str, str]:
    """The fields of a task's settings that are set and copied -> the names of the copies, as run.json has
    them."""
    return {field: name for field, name in getattr(task, "COPIES", {}).items() if getattr(task, field)}


def keep_copies(task: Any, folder: Path) -> tuple[Any, Sums]:
    """Copy the files of a task's settings into `folder` -> the settings with the copies instead, and the sums
    of these. Raises Error where a file cannot be read, or another one of its name is there already."""
    places, sums = {}, {}
    for field, name in copied(task).items():
        content, copy = _read(expanded(getattr(task, field))), folder / name
        if copy.exists() and _read(copy) != content:
            raise Error(f"{folder} has another {name} in it: choose another folder for the run")
        write_atomically(copy, lambda place, content=content: place.write_bytes(content))
        places[field], sums[field] = str(copy), sha256(content).hexdigest()
    return dataclasses.replace(task, **places), sums


def refuse_unreadable(task: Any) -> None:
    """Raise Error where a file that a run of these settings would copy cannot be read."""
    for field in copied(task):
        _read(expanded(getattr(task, field)))


def find_copies(task: Any, folder: Path, sums: Sums) -> Any:
    """Return settings as run.json has them with the places of the copies in `folder`. Raises Error where one
    is missing or has another sum."""
    places = {}
    for field, name in copied(task).items():
        copy = folder / name
        if not copy.exists():
            raise Error(f"{copy} is missing, the {field} of the run: copy it from the folder of the training")
        found = sha256(_read(copy)).hexdigest()
        if found != sums.get(field, found):
            raise Error(
                f"{copy} is not the {field} that the run was begun with: its SHA-256 begins with "
                f"{found[:8]}, not {str(sums[field])[:8]}. Put it back as it was, or begin a new run"
            )
        places[field] = str(copy)
    return dataclasses.replace(task, **places)


def refuse_others(task: Any, other: Any, where: str) -> None:
    """Raise Error where settings have another file than those of the run `where`, or only one has any."""
    for field in {**copied(task), **copied(other)}:
        own, its = (getattr(x, field, None) for x in (task, other))
        if not (own and its and _read(expanded(own)) == _read(Path(its))):
            known = f"take {its}" if its else "leave it out"
            raise Error(f"{where} was trained with another {field}: {known}, or start from nothing")


def beside(task: Any, file: Path) -> Any:
    """Return settings that a file has, with the copies that lie beside it where they do."""
    copies = {field: file.parent / getattr(task, field) for field in copied(task)}
    return dataclasses.replace(task, **{field: str(x) for field, x in copies.items() if x.exists()})


def _read(file: Path) -> bytes:
    refuse_irregular(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from error

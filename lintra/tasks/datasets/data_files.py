"""Files of data sets: where they are kept, how they are fetched and unpacked."""

import contextlib
import gzip
import importlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lintra.io.files import expanded, is_own_folder, refuse_irregular
from lintra.tasks.base import DataError

Shards = Sequence[Callable[[], np.ndarray]]  # each reads some of the images, [n h w ch] uint8

JSON_LINES = (".jsonl", ".ndjson")

# Every command reads $LINTRA_DATA; the flag is that of training alone.
NAME_THE_FOLDER = "name their folder in $LINTRA_DATA, or with lintra train --data-dir"


class Splits(NamedTuple):
    """The two parts of a data set, not read yet."""

    train: Shards
    test: Shards
    labels: Callable[[str], np.ndarray] | None = None  # of "train" or "test" the classes, [n] uint8


def named_folder(data_dir: str | None) -> Path | None:
    """Return the folder that `data_dir` or else $LINTRA_DATA names; an empty value names none."""
    named = data_dir or os.environ.get("LINTRA_DATA")
    return expanded(named) if named else None


def cache_dir(name: str) -> Path:
    """Return the user's folder for downloads of one data set (~/.cache/lintra/... on Linux)."""
    return Path(_pooch().os_cache("lintra")) / name


def fetch(url: str, sha256: str, folder: Path) -> Path:
    """Download a file into `folder`, unless it is there already and right; its path.

    $LINTRA_MIRROR, if set, stands for everything in `url` before the file's name. The file appears only
    when it is whole and its sum is right; one that was there before stays until then. Raises DataError.
    """
    pooch, name = _pooch(), url.rpartition("/")[-1]
    if mirror := os.environ.get("LINTRA_MIRROR"):
        url = f"{mirror.rstrip('/')}/{name}"
    whole = pooch.HTTPDownloader(stream=False, timeout=30)  # streamed, a refused one leaves its socket open
    try:
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=folder, downloader=whole))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"cannot download {url} to {folder}: {reason}. Try again, or fetch the files by other means: "
            f"{NAME_THE_FOLDER}"
        ) from error


def suffix(path: Path) -> str:
    """Return the last suffix of a file's name, that of its compression left out, in lower case."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".xz")).suffix


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file to read -> its content, decompressed if its name ends in .gz or .xz, and the file itself,
    whose place says how much of it is read. Raises DataError, while it is read too."""
    refuse_irregular(path, DataError)
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), contextlib.nullcontext)
    try:
        with open(path, "rb") as raw, opener(raw) as content:
            yield content, raw
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read, it may be cut short ({error}); fetch it again") from error


def unpack(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz or .xz. Raises DataError."""
    with opened(path) as (content, _):
        return content.read()


def walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder that are not hidden, except those of runs, models and prepared tokens,
    which may lie among the data that they were made of. Links are followed, to each folder once, but not to
    folders that contain the folder itself. Raises DataError for a folder that cannot be read."""

    def refused(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen = {str(x) for x in folder.resolve().parents}
    for place, folders, names in os.walk(folder, onerror=refused, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(x for x in folders if not x.startswith(".") and not is_own_folder(Path(place, x)))
        yield from (Path(place, name) for name in names if not name.startswith("."))


def all_or_none(folder: Path, names: Sequence[str]) -> list[Path] | None:
    """The files of these names in `folder`, None if it has none of them. DataError if only some are there."""
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise DataError(f"{folder} has only a part of {', '.join(names)}: {', '.join(missing)} missing")
    return [folder / name for name in names]


def _pooch() -> ModuleType:
    try:
        return importlib.import_module("pooch")
    except ImportError as error:
        raise ModuleNotFoundError(
            "downloading data needs pooch: pip install 'lintra[train]'. If you have the files, "
            f"{NAME_THE_FOLDER}",
            name="pooch",
        ) from error

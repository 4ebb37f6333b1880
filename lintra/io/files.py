"""Reading files with clear errors, and writing them whole or not at all."""

import contextlib
import ctypes
import glob
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

# Each stands for a folder of lintra's own: a run, or a model in one file, in several or in shards.
_MARKS = ("run.json", "model.safetensors", "model.safetensors.index.json", "shards.json")
_PARTS = (*_MARKS, "config.json", "training.json", "tokenizer.json", "index.json")
_TENSORS_OR_TOKENS = (".safetensors", ".tokens", ".ends")
_DAY = 86_400  # seconds


class Error(ValueError):
    """A file or folder that is missing, damaged, of another kind, in use or not writable; the message names
    it and what is wrong."""


def refuse_irregular(file: Path, error: type[Exception] = Error) -> None:
    """Raise `error` for a path that is neither a file nor a folder, such as a pipe or a terminal: reading it
    could wait forever, and writing would replace it."""
    try:
        irregular = file.exists() and not (file.is_file() or file.is_dir())
    except OSError:  # no permission: opening it says so
        return
    if irregular:
        raise error(f"{file} is not a regular file, but a pipe or a device: name a file")


def read_json(file: Path) -> Any:
    """The content of a JSON file, a byte order mark left out. Raises Error with its name."""
    refuse_irregular(file)
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise Error(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Error(f"{file} is damaged: {error}") from error


@contextlib.contextmanager
def locked(path: Path, what: Path | None = None, *, wait: bool = False) -> Iterator[None]:
    """Lock a file or folder for one process at a time. Raises Error if another holds it, which says that
    `what`, or the folder itself, is being trained. (No lock on Windows.)
    wait: wait for the other instead, and make `path`, a file of its own, if there is none."""
    if os.name == "nt":
        yield
        return
    try:
        handle = _lock(path, wait)
        while wait and not _is_at(handle, path):  # whoever held it has removed it
            _unlock(handle)
            handle = _lock(path, wait)
    except BlockingIOError as error:
        raise Error(f"{what or path} is being trained by another process") from error
    except OSError as error:  # no such file, or a file system without locks
        raise Error(f"{path} cannot be locked: {error.strerror}") from error
    try:
        yield
    finally:
        _unlock(handle)


def _lock(path: Path, wait: bool) -> int:
    """Open and lock a file or folder. The lock ends with the process, however that ends."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT if wait else os.O_RDONLY)  # NFS locks what it may write
    _held.add(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        _held.remove(handle)
        os.close(handle)
        raise
    return handle


def _unlock(handle: int) -> None:
    import fcntl

    if handle in _held:  # closed in a process that was forked
        _held.remove(handle)
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that is being forked has the handle too
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Let one process at a time make what is to be at `path`, where files can be locked: within the context,
    look whether another has made it."""
    lock = path.with_name(f".{path.name}.lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, Error):
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, wait=True))
            stack.callback(_remove, lock)
        yield


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


_held: set[int] = set()  # handles of locks


def _forget_locks() -> None:
    """Close the handles in a process that was forked: it may outlive the one that holds the locks."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a temporary path, then move the file or folder written there to `path`, or to its
    target if it is a link.

    Until then, and after an error, `path` is as it was. Raises Error if it cannot be written, or if it is a
    folder where a file is to be written.
    """
    path, work = _begin(path)
    try:
        write(work / path.name)
        publish(work / path.name, path)
    except (OSError, SafetensorError) as error:
        raise Error(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(new: Path, path: Path) -> None:
    """Put a file or folder that is written at `path`, where it appears at once and whole; what was there is
    then at `new` or beside it, if it was a folder. Raises OSError."""
    written = [new, *(new.rglob("*") if new.is_dir() else ())]
    _open_to_readers(written, path)
    _flush(*written)
    _put(new, path)
    _flush(path.parent)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file of these lines, in UTF-8, whole or not at all. Raises Error where it cannot. What is
    not valid text, such as stray bytes of a file name, is written with backslashes, which JSON reads."""
    content = "".join(f"{line}\n" for line in lines)
    write_atomically(
        path, lambda place: place.write_text(content, encoding="utf-8", errors="backslashreplace")
    )


def leftovers(folder: Path, name: str) -> list[Path]:
    """The folders in which `write_atomically` made, or still makes, what is called `name`, a pattern."""
    return [x for x in folder.glob(f".{name}.*") if x.is_dir()]


def remove_abandoned(path: Path, *, of: str | None = None) -> None:
    """Remove what killed programs left of a file or folder that `write_atomically` was to write, which may be
    large, if nothing was written to it for a day. of: a pattern of names beside it, instead of its own."""
    for work in leftovers(path.parent, of or glob.escape(path.name)):
        with contextlib.suppress(OSError):  # another process may just have finished with it
            if max(x.stat().st_mtime for x in (work, *work.rglob("*"))) < time.time() - _DAY:
                shutil.rmtree(work)


def expanded(path: str | Path) -> Path:
    """Return a path with the home that ~ stands for; as it is where the user is not known here."""
    return Path(os.path.expanduser(path))


def is_part_of(path: Path, whole: Path) -> bool:
    """Return whether a path is this file or folder, or lies in it, whatever links lead there."""
    path, whole = path.resolve(), whole.resolve()
    return path == whole or (whole in path.parents and os.path.isdir(whole))


def is_own_folder(folder: Path) -> bool:
    """Return whether a folder holds a run, a model, in one file or several, or prepared tokens."""
    return any((folder / name).exists() for name in _MARKS) or has_tokens(folder)


def has_tokens(folder: Path) -> bool:
    """Return whether a folder has files *.tokens beside *.ends. Texts may be named *.tokens too, like those
    of WikiText. False for a path that this user may not look at."""
    found = folder.glob("*.tokens") if os.path.isdir(folder) else ()
    return any(os.path.isfile(file.with_suffix(".ends")) for file in found)


def refuse_folder(name: str, path: Path | None) -> None:
    """Raise ValueError if the file that argument `name` asks to be written is a folder, a pipe, a device or
    a part of a run, a checkpoint or prepared tokens."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{name} must be a file, got the folder {path}")
    refuse_irregular(path, ValueError)
    if (path.name in _PARTS or path.suffix in _TENSORS_OR_TOKENS) and is_own_folder(path.parent):
        raise ValueError(
            f"{name} must be a file of its own, got {path}, which is a part of a run, model or prepared text"
        )


def refuse_unwritable(path: Path | None) -> None:
    """Raise Error where `write_atomically` could not begin: to know before there is anything to write. Makes
    the folder that `path` is to be in."""
    if path is not None:
        _begin(path)[1].rmdir()


def _begin(path: Path) -> tuple[Path, Path]:
    """Return what `path` leads to, and a new folder beside it."""
    try:
        path = path.resolve()
        refuse_irregular(path)
        if path.is_dir() and _runs_in(path):  # it would be exchanged for a new one
            raise Error(f"{path} cannot be written: this program runs in it, so name another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except (FileExistsError, NotADirectoryError) as error:
        raise Error(f"{path} cannot be written: above it is a file, not a folder") from error
    except OSError as error:
        raise Error(f"{path} cannot be written: {error.strerror}") from error
    except RuntimeError as error:  # a link that leads to itself
        raise Error(f"{path} cannot be written: {error}") from error


def _runs_in(folder: Path) -> bool:
    try:
        here = Path.cwd().resolve()
    except FileNotFoundError:  # it was removed
        return False
    return folder in (here, *here.parents)


def _open_to_readers(written: Sequence[Path], path: Path) -> None:
    """Give files the permissions of the file at `path`, or of any new file where there is none: safetensors
    makes its own readable by their owner alone."""
    like = path
    if not path.is_file():
        like = written[0].with_name(f".{written[0].name}")
        like.touch()
    mode = stat.S_IMODE(like.stat().st_mode)
    for file in written:
        if file.is_file():
            file.chmod(mode)


def _put(new: Path, path: Path) -> None:
    """Renames `new` to `path`. A folder cannot be renamed onto another: the two are exchanged."""
    if not path.is_dir():
        new.replace(path)
        return
    if not new.is_dir():
        raise IsADirectoryError(21, "it is a folder")
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux
    if exchange is not None and exchange(here, os.fsencode(new), here, os.fsencode(path), swap) == 0:
        return
    before = new.with_name(f"{new.name}.before")  # elsewhere a moment without either remains
    path.rename(before)
    try:
        new.rename(path)
    except OSError:
        before.rename(path)
        raise


def _flush(*paths: Path) -> None:
    """Flush to the disk, so that a power cut leaves the old or the new, not an empty file."""
    windows = os.name == "nt"  # where folders cannot be flushed and files must be open for writing
    for path in paths:
        if windows and path.is_dir():
            continue
        handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

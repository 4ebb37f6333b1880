"""Texts as subword tokens, kept in the user's cache, since a large one takes minutes."""

import contextlib
import itertools
from hashlib import sha256
from pathlib import Path

import numpy as np

from lintra.io.files import Error, in_turn, remove_abandoned, write_atomically
from lintra.tasks.base import Watch, unwatched
from lintra.tasks.datasets.data_files import cache_dir
from lintra.tokenizer import Tokenizer, pieces

KEPT_FROM = 2**22  # bytes: a text that is shorter takes less than some seconds
_TOGETHER = 64  # pieces that are encoded at once, on all threads


def encoded(text: bytes | memoryview, tokenizer: Tokenizer, watch: Watch = unwatched) -> np.ndarray:
    """Return the tokens of a text in UTF-8; of a large one, from a file of them if there is one, mapped into
    memory."""
    file = _kept(text, tokenizer) if len(text) >= KEPT_FROM else None
    if file is None:
        return _encode(text, tokenizer, watch)
    if (found := _mapped(file, tokenizer)) is not None:
        return found
    remove_abandoned(file, of="*.npy")  # each text has its own file, and may never be used again
    with in_turn(file):  # all processes of a training begin here at once
        if (found := _mapped(file, tokenizer)) is not None:
            return found
        tokens = _encode(text, tokenizer, watch)
        with contextlib.suppress(Error):  # a full disk, a read-only home: the time is spent again
            write_atomically(file, lambda place: np.save(place, tokens))
    return tokens


def _encode(text: bytes | memoryview, tokenizer: Tokenizer, watch: Watch) -> np.ndarray:
    found, done = [np.empty(0, tokenizer.dtype)], 0
    with watch("encoding", len(text), "bytes") as report:
        parts = pieces(text)
        while group := list(itertools.islice(parts, _TOGETHER)):
            found += tokenizer.encode_all(group)
            done += sum(len(part.encode()) for part in group)
            report(done)
    return np.concatenate(found)


def _kept(text: bytes | memoryview, tokenizer: Tokenizer) -> Path | None:
    """Return the file of these tokens, whether it is there or not, named after all that determines them; None
    where the user's cache cannot be found."""
    import tokenizers

    name = sha256(f"{tokenizer.sum} {tokenizers.__version__} ".encode())
    name.update(text)
    try:
        return cache_dir("tokens") / f"{name.hexdigest()[:32]}.npy"
    except ModuleNotFoundError:  # pooch, which finds it
        return None


def _mapped(file: Path, tokenizer: Tokenizer) -> np.ndarray | None:
    """Return the tokens in a file; None if it is missing or damaged."""
    try:
        found = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    fits = isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype == tokenizer.dtype
    return found if fits else None

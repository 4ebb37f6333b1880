"""Audio that comes through a pipe, which can be read only once: WAV, or raw samples.

WAV is read as it comes, its length known or not: programs that write to a pipe cannot fill it in.
"""

import struct
from collections.abc import Callable, Generator
from typing import NamedTuple

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.audio.samples import CONVERT, Audio, check_rate, checked

Read = Callable[[int], bytes]  # at most so many bytes, once there are some; empty at the end

UNKNOWN = 0x7FFF_0000  # bytes, or more: of a file that was written before its end was known
ANOTHER = "holds another recording behind the first, which would not be heard: give one at a time"
_RAW = "<i2"
_TYPES = {
    (1, 8): "u1",
    (1, 16): _RAW,
    (1, 24): "<i3",
    (1, 32): "<i4",
    (3, 32): "<f4",
    (3, 64): "<f8",
}  # by WAV's number of a form, and bits of a sample
_EXTENSIBLE = 0xFFFE
_IN_64_BITS = 0xFFFF_FFFF
_SKIPPED_AT_ONCE = 2**16  # bytes


class _Form(NamedTuple):
    rate: int
    channels: int
    dtype: str
    length: int | None  # bytes of audio that are to come; None: not known

    @property
    def frame(self) -> int:
        """The bytes of one sample of all channels."""
        return int(self.dtype[-1]) * self.channels


def pieces(
    read: Read,
    *,
    rate: int | None = None,
    seconds: float,
    name: str,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Audio, None, None]:
    """The audio that `read` gives, in pieces of about so many seconds; channels are averaged.

    rate: of raw samples of 16 bits, little-endian, one channel, in Hz; WAV has its own. stopped: says that
    its end was asked for, so that nothing is missing then. Raises SpeechError, some of it only when the
    pieces before are out: for what is neither, empty, cut short, not finite, slower than 1,000 Hz or
    followed by another WAV.
    """
    source = _Source(read)
    head = source.take(12)
    if not head:
        if stopped():
            return
        raise SpeechError(f"{name} is empty")
    if begins_wav(head):
        form = _read_header(source, name)
        if rate not in (None, form.rate):
            raise SpeechError(f"{name} is WAV of {form.rate:,} Hz, not {rate:,}: leave the rate out")
    elif rate is None:
        raise SpeechError(
            f"{name} is not WAV: say the rate of raw samples (16 bits, little-endian, one channel), or pipe "
            "it through ffmpeg -i FILE -f wav -"
        )
    else:
        source.put_back(head)
        form = _Form(rate, 1, _RAW, None)
    check_rate(form.rate, name)
    step, left = max(1, round(seconds * form.rate)) * form.frame, form.length
    over = False
    while not over:
        wanted = step if left is None else min(step, left)
        content = source.take(wanted)
        left = None if left is None else left - len(content)
        over = len(content) < wanted or left == 0
        whole = len(content) - len(content) % form.frame
        if whole:
            samples = _floats(content[:whole], form.dtype).reshape(-1, form.channels).mean(1)
            yield Audio(checked(samples, name), form.rate)
        if stopped() or not over:
            continue
        if left:
            assert form.length is not None
            raise SpeechError(
                f"{name} is cut short: it should have {form.length} bytes of audio and has "
                f"{form.length - left}"
            )
        if whole < len(content):
            raise SpeechError(f"{name} is cut short: it ends in the middle of a sample")
    if form.length is not None and not stopped():
        _refuse_another(source, form.length, name)


class _Source:
    """Read as many bytes as requested, however few come at once."""

    def __init__(self, read: Read):
        self._read, self._ahead = read, b""

    def take(self, n: int) -> bytes:
        """The next n bytes; fewer at the end."""
        found, self._ahead = bytearray(self._ahead[:n]), self._ahead[n:]
        while len(found) < n and (more := self._read(n - len(found))):
            found += more
        return bytes(found)

    def put_back(self, content: bytes) -> None:
        self._ahead = content + self._ahead

    def skip(self, n: int) -> None:
        while n and (taken := len(self.take(min(n, _SKIPPED_AT_ONCE)))):
            n -= taken


def _read_header(source: _Source, name: str) -> _Form:
    """The form of a WAV after its first twelve bytes; what follows in the source is audio."""
    form: _Form | None = None
    long: int | None = None  # the bytes of audio, where 32 bits do not hold them
    while len(head := source.take(8)) == 8:
        kind, size = struct.unpack("<4sI", head)
        if kind == b"data":
            if form is None:
                raise SpeechError(f"{name} is damaged: it does not say of which form its samples are")
            return form._replace(length=_length(size, long))
        content = source.take(min(size, 40))
        if kind == b"fmt ":
            form = _form(content, name)
        elif kind == b"ds64" and len(content) >= 16:
            (long,) = struct.unpack_from("<Q", content, 8)
        source.skip(size - len(content) + size % 2)
    raise SpeechError(f"{name} is cut short: it has no audio")


def _refuse_another(source: _Source, length: int, name: str) -> None:
    """Raise SpeechError where another WAV begins behind the audio of one, of so many bytes, and behind the
    chunks that say more of it."""
    if length % 2 and (odd := source.take(1)) != b"\0":  # padding of the last chunk, if there is any
        source.put_back(odd)
    while len(head := source.take(12)) == 12:
        if begins_wav(head):
            raise SpeechError(f"{name} {ANOTHER}")
        source.put_back(head[8:])
        (size,) = struct.unpack("<I", head[4:8])
        source.skip(size + size % 2)


def begins_wav(head: bytes) -> bool:
    """Return whether a WAV begins with these twelve bytes."""
    return head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"


def _form(content: bytes, name: str) -> _Form:
    if len(content) < 16:
        raise SpeechError(f"{name} is damaged: it does not say of which form its samples are")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if tag == _EXTENSIBLE and len(content) >= 26:
        valid, _, tag = struct.unpack_from("<HIH", content, 18)
        bits = bits if valid % 8 == 0 else valid
    if (tag, bits) not in _TYPES or not channels:
        raise SpeechError(
            f"{name} must have samples of 8, 16, 24 or 32 bits, or floats of 32 or 64, got WAV of form {tag} "
            f"with {bits} bits and {channels} channels: {CONVERT}"
        )
    return _Form(rate, channels, _TYPES[tag, bits], None)


def _length(size: int, long: int | None) -> int | None:
    """Return how many bytes of audio are to come, by the 32 bits that say it, or 64; None: unknown."""
    if size == _IN_64_BITS and long is not None:
        return long if 0 < long < 2**62 else None
    return size if 0 < size < UNKNOWN else None


def _floats(content: bytes, dtype: str) -> np.ndarray:
    """Samples of full scale 1, float32 [n]."""
    if dtype == "<i3":  # the upper bytes of 32 bits
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return _floats(wide.tobytes(), "<i4")
    x = np.frombuffer(content, dtype)
    with np.errstate(over="ignore"):  # it is refused then, as what is not finite
        if dtype[1] == "f":
            return x.astype(np.float32)
        full = np.float32(2.0 ** (8 * x.itemsize - 1))
        return (x.astype(np.float32) - (full if x.itemsize == 1 else 0)) / full

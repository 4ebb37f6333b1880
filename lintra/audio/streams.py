"""Several recordings in one file, and MP3s longer than they say: audio that libsndfile would skip."""

import mmap
from functools import lru_cache
from pathlib import Path

from lintra.audio.piped import begins_wav

# Bits in a second of an MPEG frame in kbit/s, by the version (1; 2 and 2.5) and layer of its header.
_BITRATES = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44_100, 48_000, 32_000)  # Hz of MPEG 1, by index; those of 2 and 2.5 are a half and a quarter
_STREAMINFO = b"fLaC\0\0\0\x22", b"fLaC\x80\0\0\x22"  # how a FLAC stream begins: with a block of 34 bytes


def holds_another(path: Path) -> bool:
    """Return whether a WAV, FLAC or Ogg file holds a second recording after the first."""
    with path.open("rb") as file:
        head = file.read(12)
        kind = head[:4]
        if kind == b"RIFF" and (size := int.from_bytes(head[4:8], "little")):
            file.seek(8 + size)
            behind = file.read(13)  # with the byte that fills up an odd chunk, if it is not counted
            return begins_wav(behind[:12]) or (size % 2 == 1 and begins_wav(behind[1:]))
        if kind not in (b"fLaC", b"OggS"):
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if kind == b"OggS":
                return _chained(content)
            return any(content.find(begin, len(begin)) >= 0 for begin in _STREAMINFO)


def _chained(content: mmap.mmap) -> bool:
    """Return whether a stream begins after pages of others (RFC 3533, section 4: chaining)."""
    place, others = 0, False
    while content[place : place + 4] == b"OggS" and len(content) - place > 27:
        begins, segments = bool(content[place + 5] & 2), content[place + 26]
        if begins and others:
            return True
        others = others or not begins
        place += 27 + segments + sum(content[place + 27 : place + 27 + segments])
    return False


def mp3_samples(path: Path) -> int:
    """Return the samples of all MPEG audio frames in a file, by their headers; 0 where there is none.

    Encoders add about a frame before the audio and fill the last one: the recording is that much shorter.
    """
    state = path.stat()
    return _mp3_samples(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=64)
def _mp3_samples(path: Path, changed: int, size: int) -> int:
    """Count once for all sections of a file, as long as it is not changed."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place, samples = 0, 0
        while place + 4 <= len(content):
            if content[place : place + 3] == b"ID3":  # a tag of ID3v2; its size is of 7 bits a byte
                sizes = content[place + 6 : place + 10]
                place += 10 + sum((x & 127) << 7 * (3 - i) for i, x in enumerate(sizes))
            elif content[place : place + 8] == b"APETAGEX":  # a tag of APEv2, with its header
                place += 32 + int.from_bytes(content[place + 12 : place + 16], "little")
            elif (frame := _frame(content[place : place + 4])) is not None:
                place, samples = place + frame[0], samples + frame[1]
            else:  # to the next place at which a frame may begin
                place = content.find(b"\xff", place + 1)
                if place < 0:
                    break
        return samples


def _frame(header: bytes) -> tuple[int, int] | None:
    """Return the bytes and the samples of the frame with this header; None for what is none. ISO 11172-3,
    section 2.4.1.3."""
    word = int.from_bytes(header, "big")
    version, layer, bitrate, rate = (
        (word >> 19) & 3,
        4 - ((word >> 17) & 3),
        (word >> 12) & 15,
        (word >> 10) & 3,
    )
    if word >> 21 != 0x7FF or version == 1 or layer == 4 or not 1 <= bitrate <= 14 or rate == 3:
        return None
    first, padding = version == 3, (word >> 9) & 1
    hz = _RATES[rate] // {3: 1, 2: 2, 0: 4}[version]
    bits = 1_000 * _BITRATES[1 if first else 2, layer][bitrate - 1]
    if layer == 1:
        return 4 * (12 * bits // hz + padding), 384
    samples = 1_152 if layer == 2 or first else 576
    return samples // 8 * bits // hz + padding, samples

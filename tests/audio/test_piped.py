"""Audio from a pipe is that of the file, however few bytes come at once and whatever length is claimed."""

import io
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.audio import waveform
from lintra.audio.errors import SpeechError
from lintra.audio.piped import pieces
from lintra.audio.samples import Audio, resampled
from tests.tasks.speech import RATE

NAME = "standard input"
FORMS = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"]


def wav(samples, subtype="PCM_16", rate=RATE, form="WAV") -> bytes:
    content = io.BytesIO()
    soundfile.write(content, samples, rate, subtype=subtype, format=form)
    return content.getvalue()


def noise(n=1_000, channels=1):
    return np.random.default_rng(0).uniform(-0.9, 0.9, (n, channels))


def heard(content, at_once=10**9, **options):
    options = {"seconds": 0.01, "name": NAME} | options
    file = io.BytesIO(content)
    found = list(pieces(lambda n: file.read(min(n, at_once)), **options))
    assert {x.rate for x in found} <= {RATE}
    return np.concatenate([np.zeros(0, np.float32), *(x.samples for x in found)])


def unknown(content: bytes, size: int) -> bytes:
    """The file with another length of audio in its header."""
    place = content.index(b"data") + 4
    return content[:place] + struct.pack("<I", size) + content[place + 4 :]


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("subtype", FORMS)
def test_what_the_file_says(tmp_path, subtype, channels):
    (tmp_path / "a.wav").write_bytes(content := wav(noise(channels=channels), subtype))
    whole = waveform.read(tmp_path / "a.wav", RATE)
    assert len(whole) == 1_000
    for size in (None, 0, 0x7FFF_0000, 0x8000_0000, 0xFFFF_FFFF):
        given = content if size is None else unknown(content, size)
        if b"PEAK" in given[given.index(b"data") :]:
            continue  # it comes after the audio and would be taken for audio
        np.testing.assert_array_equal(heard(given), whole)
    np.testing.assert_array_equal(heard(content + b"LIST\4\0\0\0more"), whole)
    (tmp_path / "a.wav").write_bytes(content := wav(noise(channels=channels), subtype, form="WAVEX"))
    np.testing.assert_array_equal(heard(content), waveform.read(tmp_path / "a.wav", RATE))
    content = wav(noise(channels=channels), subtype, form="RF64")
    np.testing.assert_array_equal(heard(content), whole)


@given(
    at_once=st.integers(1, 3_000),
    seconds=st.floats(0.001, 0.3),
    raw=st.booleans(),
    channels=st.integers(1, 2),
)
@settings(max_examples=20)
def test_in_pieces_of_any_size(at_once, seconds, raw, channels):
    samples = noise(channels=1 if raw else channels)
    content = wav(samples)
    if raw:
        content, options = content[content.index(b"data") + 8 :], {"rate": RATE}
    else:
        options = {}
    found = heard(content, at_once, seconds=seconds, **options)
    np.testing.assert_allclose(found, samples.mean(1), atol=1 / 32_768)
    np.testing.assert_array_equal(found, heard(content, **options))


@pytest.mark.parametrize("samples", [10, 11])  # samples of one byte: an odd chunk is padded
@pytest.mark.parametrize("between", [b"", b"LIST\4\0\0\0more"])
def test_a_second_recording_is_not_left_out_in_silence(tmp_path, samples, between):
    """It is refused: in a pipe once the first has come out, as in a file. Further metadata is not refused."""
    first, second = wav(noise(samples), "PCM_U8"), wav(noise(3))
    if between:
        size = struct.pack("<I", len(first) - 8 + len(between))
        first = first[:4] + size + first[8:] + between
    (tmp_path / "a.wav").write_bytes(first)
    assert len(heard(first)) == len(waveform.read(tmp_path / "a.wav", RATE)) == samples
    (tmp_path / "a.wav").write_bytes(first + second)
    with pytest.raises(
        SpeechError, match=r"a\.wav holds another recording behind the first.*give one at a time"
    ):
        waveform.read(tmp_path / "a.wav", RATE)
    file = io.BytesIO(first + second)
    found = pieces(file.read, seconds=1, name=NAME)
    assert len(next(found).samples) == samples
    with pytest.raises(SpeechError, match="standard input holds another recording behind the first"):
        next(found)
    for rest in (first[:9], b"\0" * 100, b"TAG and what a program writes there"):
        assert len(heard(first + rest)) == samples


def test_raw_samples():
    values = np.array([0, 16_384, -32_768, 32_767], "<i2")
    found = heard(values.tobytes(), rate=RATE)
    np.testing.assert_array_equal(found, np.array([0, 0.5, -1, 32_767 / 32_768], np.float32))


def test_nothing_is_missing_where_the_end_was_asked_for():
    content = wav(noise())
    whole = heard(content)
    for end in (len(content) // 2, len(content) // 2 + 1):
        found = heard(content[:end], stopped=lambda: True)
        np.testing.assert_array_equal(found, whole[: len(found)])
        assert len(found) == (end - 44) // 2
    assert not len(heard(b"", stopped=lambda: True))


def header(tag=1, bits=16, channels=1, rate=RATE, length=0):
    size = bits // 8 * channels
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * size, size, bits)
    return b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0" + form + b"data" + struct.pack("<I", length)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, "standard input is empty"),
        (b"", {"rate": RATE}, "standard input is empty"),
        (
            bytes(100),
            {},
            "is not WAV: say the rate of raw samples .*, or pipe it through ffmpeg",
        ),
        (b"fLaC" + bytes(100), {}, "is not WAV"),
        (b"RIFF\0\0\0\0AVI " + bytes(100), {}, "is not WAV"),
        (bytes(101), {"rate": RATE}, "is cut short: it ends in the middle of a sample"),
        (bytes(100), {"rate": 10}, "must have a rate of at least 1,000 Hz to be heard, got 10"),
        (bytes(100), {"rate": 10**23}, "must have a rate of at most 16,777,216 Hz, got 100,000"),
        (header(rate=10) + bytes(100), {}, "must have a rate of at least 1,000 Hz to be heard, got 10"),
        (header() + bytes(100), {"rate": 9_000}, "is WAV of 8,000 Hz, not 9,000: leave the rate out"),
        (header(length=100) + bytes(60), {}, "is cut short: it should have 100 bytes of audio and has 60"),
        (header()[:-8], {}, "is cut short: it has no audio"),
        (header()[:20], {}, "is damaged: it does not say of which form|is cut short"),
        (header()[:12] + b"data\0\0\0\0", {}, "is damaged: it does not say of which form its samples are"),
        (header(tag=2, bits=4) + bytes(99), {}, "got WAV of form 2 with 4 bits and 1 channels: convert it"),
        (header(bits=12) + bytes(99), {}, "must have samples of 8, 16, 24 or 32 bits, .*, got .* 12 bits"),
        (header(channels=0) + bytes(99), {}, "and 0 channels"),
        (header(3, 32) + b"\xff" * 400, {}, "has samples that are not finite"),
        (header(3, 64) + struct.pack("<d", 1e300), {}, "has samples that are not finite"),
        (header(3, 32) + struct.pack("<f", 1e7), {}, r"has samples beyond 1e\+06"),
    ],
)
def test_what_is_no_audio(content, options, message):
    with pytest.raises(SpeechError, match=message):
        heard(content, **options)


def test_what_came_before_an_error_is_heard_at_another_rate_too():
    def broken():
        yield from parts
        raise SpeechError("the end is missing")

    parts, found = [Audio(noise()[:, 0].astype(np.float32), RATE)] * 2, []

    def hear():
        for piece in resampled(broken(), RATE // 2):
            found.append(piece)

    with pytest.raises(SpeechError, match="the end is missing"):
        hear()
    whole = list(resampled(iter(parts), RATE // 2))
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(whole))

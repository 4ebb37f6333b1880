"""Formats that libsndfile cannot read: ffmpeg itself, and a stand-in that fails in every way."""

import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from lintra.audio.errors import SpeechError
from lintra.audio.waveform import blocks, read
from tests.audio.ffmpeg import only_on_path, real_ffmpeg, stand_in
from tests.tasks.speech import RATE, write_wave

COPY = "out.write(header(8000, 2)); out.write(content)"  # the content of the file, as floats of two channels


def noise(n=3 * RATE):
    return np.random.default_rng(0).uniform(-0.5, 0.5, n).astype(np.float32)


@pytest.fixture
def ffmpeg(tmp_path, monkeypatch):
    """The program itself, on PATH; a path to write to."""
    program = real_ffmpeg()
    if program is None:
        pytest.skip("there is no ffmpeg here")
    only_on_path(monkeypatch, tmp_path / "bin", program)

    def convert(source: Path, name: str, *options: str) -> Path:
        target = tmp_path / name
        command = [program, "-v", "error", "-i", str(source), *options, f"file:{target}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return target

    return convert


@pytest.mark.slow
def test_what_libsndfile_does_not_read(ffmpeg, tmp_path):
    """Lossless formats give back the input, and AAC in m4a something close; in pieces and in sections too."""
    wave = write_wave(tmp_path / "a.wav", noise())
    samples = read(wave, RATE)
    lossless = ffmpeg(wave, "a.mka", "-c:a", "pcm_s16le")
    np.testing.assert_array_equal(read(lossless, RATE), samples)
    np.testing.assert_array_equal(np.concatenate(list(blocks(lossless, RATE, seconds=0.3))), samples)
    np.testing.assert_array_equal(read(lossless, 16_000), read(wave, 16_000))
    section = read(lossless, RATE, start=0.5, duration=1.25)
    np.testing.assert_array_equal(section, samples[RATE // 2 : RATE // 2 + 10_000])
    tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(4 * RATE) / RATE)
    m4a = read(ffmpeg(write_wave(tmp_path / "b.wav", tone), "-b; $(x) 'y'.m4a", "-c:a", "aac"), RATE)
    assert abs(len(m4a) - len(tone)) < 0.2 * RATE
    near = np.abs(np.fft.rfft(m4a[RATE : 3 * RATE]))
    assert near.argmax() == 2 * 440
    assert 0.25 < np.abs(m4a[RATE : 3 * RATE]).max() < 0.35


@pytest.mark.slow
def test_sections_that_are_none(ffmpeg, tmp_path):
    file = ffmpeg(write_wave(tmp_path / "a.wav", noise()), "a.mka", "-c:a", "pcm_s16le")
    with pytest.raises(SpeechError, match=r"a\.mka ends after 3 seconds: there is nothing from 3 on"):
        read(file, RATE, start=3.0)
    with pytest.raises(SpeechError, match=r"a\.mka ends after 3 seconds, before the 3\.75 asked for"):
        read(file, RATE, start=2.0, duration=1.75)
    assert len(read(file, RATE, start=2.0, duration=1.25)) == RATE


def test_damaged_files(ffmpeg, tmp_path):
    file = ffmpeg(write_wave(tmp_path / "a.wav", noise()), "a.m4a", "-c:a", "aac")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(SpeechError, match=r"a\.m4a cannot be read as audio: .*; ffmpeg: moov"):
        read(file, RATE)
    early = ffmpeg(tmp_path / "a.wav", "b.m4a", "-c:a", "aac", "-movflags", "+faststart")
    early.write_bytes(early.read_bytes()[: len(content) // 2])
    with pytest.raises(SpeechError, match=r"b\.m4a cannot be read as audio: .*; ffmpeg: \w"):
        read(early, RATE)
    file.write_text("This is no audio at all. " * 100)
    with pytest.raises(SpeechError, match=r"a\.m4a cannot be read as audio: .*; ffmpeg: \w"):
        read(file, RATE)


def test_without_ffmpeg(tmp_path, monkeypatch):
    only_on_path(monkeypatch, tmp_path / "bin", None)
    (tmp_path / "a.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(200))
    with pytest.raises(SpeechError, match=r"a\.m4a cannot be read as audio: [^.]* \(install ffmpeg to hear"):
        read(tmp_path / "a.m4a", RATE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["-y.m4a", "a b;'\"$(x).m4a", "http:x.m4a", "%d.m4a"])
def test_names_are_names(tmp_path, monkeypatch, name):
    """Whatever its name, a file is passed as one argument, and as a file."""
    log = stand_in(monkeypatch, tmp_path / "bin", COPY)
    monkeypatch.chdir(tmp_path)
    both = np.stack([noise(), -noise() / 2], 1)
    Path(name).write_bytes(both.astype("<f4").tobytes())
    np.testing.assert_array_equal(read(name, RATE), both.mean(1))
    arguments = json.loads(log.read_text())
    assert arguments[arguments.index("-i") + 1] == f"file:{tmp_path / name}"
    assert arguments[arguments.index("-protocol_whitelist") + 1] == "file"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('[aac @ 0x5] bad packet\\nmore', file=sys.stderr); sys.exit(1)", "; ffmpeg: bad packet$"),
        ("sys.exit(3)", "; ffmpeg: it says nothing$"),
        (f"{COPY}; print('[a @ b] lost', file=sys.stderr); sys.exit(1)", "; ffmpeg: lost$"),
        ("out.write(header(8000, 1))", "a.m4a is empty: it has no samples"),
        ("out.write(header(100, 1)); out.write(bytes(9999999))", "must have a rate of at least 1,000 Hz"),
        ("out.write(header(8000, 1)); out.write(b'\\xff' * 9999999)", "has samples that are not finite"),
        ("out.write(header(8000, 1, 500)[:30])", "is damaged: it does not say|is cut short: it has no audio"),
    ],
)
def test_what_goes_wrong_is_said(tmp_path, monkeypatch, body, message):
    stand_in(monkeypatch, tmp_path / "bin", body)
    file = tmp_path / "a.m4a"
    file.write_bytes(noise().tobytes())
    with pytest.raises(SpeechError, match=message):
        read(file, RATE)


def test_what_is_not_heard_to_its_end_is_not_decoded(tmp_path, monkeypatch):
    """The program ends when the reader stops."""
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))\n"
    body += "out.write(header(8000, 1))\nwhile True: out.write(content)"
    stand_in(monkeypatch, tmp_path / "bin", body)
    file = tmp_path / "a.m4a"
    file.write_bytes(noise().tobytes())
    assert len(read(file, RATE, start=0.1, duration=1.0)) == RATE
    pieces = blocks(file, RATE, seconds=0.5)
    assert len(next(pieces)) == RATE // 2
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")

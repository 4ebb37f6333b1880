"""Audio: every format gives the same samples, pieces add up to the whole, and errors name what is wrong."""

import os
import shutil
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.audio import decoder, streams
from lintra.audio import waveform as reader
from lintra.audio.errors import SpeechError
from lintra.audio.waveform import Audio, blocks, changed_speed, read

RATE = 8_000


def audio(samples=RATE, channels=1, seed=0):
    """Quiet noise."""
    draw = np.random.default_rng(seed).normal(scale=0.1, size=(samples, channels))
    return draw.astype(np.float32)


def tone(hz, rate, seconds=0.5):
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


@pytest.fixture
def write(tmp_path):
    """Write samples into a file of this name and return its path."""

    def write(name="a.wav", samples=None, rate=RATE, **options):
        path = tmp_path / name
        soundfile.write(path, audio() if samples is None else samples, rate, **options)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "options", "step"),
    [
        ("a.wav", {"subtype": "PCM_U8"}, 2**-7),
        ("a.wav", {"subtype": "PCM_16"}, 2**-15),
        ("a.wav", {"subtype": "PCM_24"}, 2**-23),
        ("a.wav", {"subtype": "PCM_32"}, 2**-23),  # the precision of float32
        ("a.wav", {"subtype": "FLOAT"}, 0),
        ("a.wav", {"subtype": "DOUBLE"}, 0),
        ("a.flac", {"subtype": "PCM_24"}, 2**-23),
        ("a.aiff", {"subtype": "PCM_16"}, 2**-15),
        ("a name with spaces, \u00e9.wav", {"subtype": "PCM_16"}, 2**-15),
    ],
)
def test_every_format_has_the_same_samples(write, name, options, step):
    samples = audio(channels=2)
    got = read(write(name, samples, **options), RATE)
    assert got.dtype == np.float32
    # Rounding may change a sample by one step; the mean of two channels is float32.
    np.testing.assert_allclose(got, samples.mean(1), rtol=1e-6, atol=step + 1e-7)


@pytest.mark.parametrize("name", ["a.ogg", "a.mp3"])
def test_lossy_formats(write, name):
    samples = tone(440, 16_000, 2.0)
    got = read(write(name, samples, 16_000), 16_000)
    assert len(got) == len(samples)
    np.testing.assert_allclose(got[2_000:-2_000], samples[2_000:-2_000], atol=0.05)


def test_what_people_bring(write):
    """Stereo of 24 bits at 44.1 kHz is resampled as one channel."""
    path = write("a.flac", audio(44_100, channels=2), 44_100, subtype="PCM_24")
    whole, _ = soundfile.read(path, dtype="float32")
    np.testing.assert_array_equal(read(path, 16_000), soxr.resample(whole.mean(1), 44_100, 16_000))


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000])
def test_a_tone_stays_a_tone_at_another_rate(write, rate):
    got = read(write(samples=tone(1_000, rate), rate=rate, subtype="FLOAT"), 16_000)
    wanted = tone(1_000, 16_000)
    assert abs(len(got) - len(wanted)) <= 1
    inside = slice(800, 7_200)  # far enough from the ends for the filter
    np.testing.assert_allclose(got[inside], wanted[inside], atol=1e-4)


def test_what_a_lower_rate_cannot_hold_is_gone(write):
    got = read(write(samples=tone(6_000, 44_100), rate=44_100, subtype="FLOAT"), RATE)
    assert np.abs(got[400:-400]).max() < 1e-3


@settings(max_examples=25)
@given(st.integers(1, 30_000), st.sampled_from([4_000, RATE, 11_025]), st.floats(1e-3, 2.0))
def test_pieces_are_the_whole(tmp_path_factory, samples, rate, seconds):
    path = tmp_path_factory.getbasetemp() / "pieces.wav"
    soundfile.write(path, audio(samples), RATE)
    pieces = list(blocks(path, rate, seconds=seconds))
    np.testing.assert_array_equal(np.concatenate(pieces), read(path, rate))
    held = 0.5  # seconds held by the resampler
    assert max(map(len, pieces)) <= rate * (seconds + held)


def test_pieces_need_little_memory(write):
    path = write(samples=audio(60 * RATE, channels=2))
    tracemalloc.start()
    samples = sum(len(piece) for piece in blocks(path, 16_000, seconds=1.0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert samples == 60 * 16_000
    assert peak < 60 * RATE  # bytes: the whole takes 8 times as many, and twice that at the other rate


@settings(max_examples=25)
@given(st.integers(0, RATE - 1), st.integers(1, RATE))
def test_a_section_is_a_slice(tmp_path_factory, first, n):
    path, samples = tmp_path_factory.getbasetemp() / "section.wav", audio()[:, 0]
    soundfile.write(path, samples, RATE, subtype="FLOAT")
    n = min(n, RATE - first)
    section = {"start": first / RATE, "duration": n / RATE}
    np.testing.assert_array_equal(read(path, RATE, **section), samples[first : first + n])
    np.testing.assert_array_equal(read(path, RATE, start=first / RATE), samples[first:])
    for rate in (RATE, 11_025):
        np.testing.assert_array_equal(
            read(path, rate, **section), read(Audio(samples, RATE), rate, **section)
        )


def test_mapped_samples_are_resampled(tmp_path):
    np.save(tmp_path / "a.npy", audio()[:, 0])
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for rate in (RATE, 16_000):
        np.testing.assert_array_equal(read(Audio(mapped, RATE), rate), read(Audio(audio()[:, 0], RATE), rate))


def test_a_name_that_says_too_little_or_is_no_text(write, monkeypatch):
    path = write()
    raw = path.with_name("x.raw")
    shutil.copy(path, raw)
    monkeypatch.setattr(decoder.shutil, "which", lambda name: None)
    with pytest.raises(SpeechError, match=r"x\.raw .*by its name it holds raw samples"):
        read(raw, RATE)
    if sys.platform != "darwin":  # which has no such names
        odd = path.with_name(os.fsdecode(b"\xff.wav"))
        shutil.copy(path, odd)
        np.testing.assert_array_equal(read(odd, RATE), read(path, RATE))


def test_a_section_shorter_than_a_sample_is_empty(write):
    path = write()
    for source in (path, Audio(read(path, RATE), RATE)):
        for start in (0.0, 0.5):
            assert len(read(source, RATE, start=start, duration=1e-7)) == 0


def test_a_section_may_end_a_little_late(write):
    path = write()
    for source in (path, Audio(read(path, RATE), RATE)):
        assert len(read(source, RATE, start=0.75, duration=0.7)) == RATE // 4
        with pytest.raises(SpeechError, match=r"ends after 1 seconds, before the 1\.6 asked for"):
            read(source, RATE, start=0.75, duration=0.85)
        with pytest.raises(SpeechError, match="ends after 1 seconds, before"):
            read(source, RATE, duration=1e300)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"start": 1.0}, "ends after 1 seconds: there is nothing from 1 on"),
        ({"start": 1e300}, r"there is nothing from 1e\+300 on"),
        ({"start": -0.1}, r"start must be 0 or more seconds, got -0\.1"),
        ({"start": float("nan")}, "start must be 0 or more seconds, got nan"),
        ({"start": float("inf")}, "start must be 0 or more seconds, got inf"),
        ({"duration": 0.0}, r"duration must be more than 0 seconds, and finite, got 0\.0"),
        ({"duration": -1.0}, "duration must be more than 0 seconds"),
        ({"duration": float("nan")}, "duration must be more than 0 seconds"),
    ],
)
def test_sections_that_are_none(write, section, message):
    path = write()
    for source in (path, Audio(read(path, RATE), RATE)):
        with pytest.raises(SpeechError, match=message):
            read(source, RATE, **section)


@pytest.mark.parametrize("name", ["a.wav", "a.aiff", "a.au", "a.flac", "a.ogg"])
@pytest.mark.parametrize("share", [0.9, 0.5])
def test_files_that_are_cut_short(write, name, share):
    path = write(name, audio(RATE * 4))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SpeechError, match=rf"{name} (is cut short|cannot be read as audio)"):
        read(path, RATE)
    with pytest.raises(SpeechError, match=name):
        list(blocks(path, RATE))


@pytest.mark.parametrize("claim", [0xFFFF_FFFF, 0x7FFF_FFFF])
def test_a_wave_file_that_was_written_to_a_pipe(write, claim):
    """When such a header is written, the length is unknown."""
    path = write()
    wanted, content = read(path, RATE), bytearray(path.read_bytes())
    place = content.index(b"data") + 4
    content[4:8] = content[place : place + 4] = struct.pack("<I", claim)
    path.write_bytes(content)
    np.testing.assert_array_equal(read(path, RATE), wanted)


def test_a_flac_file_that_was_written_to_a_pipe(write):
    path = write("a.flac")
    wanted, content = read(path, RATE), bytearray(path.read_bytes())
    content[21] &= 0xF0  # the 36-bit number of samples comes after "fLaC", a header of 4 bytes and 13.5 more
    content[22:26] = bytes(4)
    path.write_bytes(content)
    np.testing.assert_array_equal(read(path, RATE), wanted)


def test_an_mp3_file_without_its_length(write):
    """The length is then a guess from the first frames, which are small: they hold silence here."""
    samples = np.concatenate([np.zeros((40_000, 1), np.float32), audio(40_000)])
    path = write("a.mp3", samples, 16_000, bitrate_mode="VARIABLE")
    content = path.read_bytes()
    path.write_bytes(content[content.index(content[:2], 2) :])  # the first frame holds the length
    assert 80_000 <= len(read(path, 16_000)) < 84_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.wav is empty"),
        (b"RIFF", "x.wav cannot be read as audio"),
        (b"This is no audio, whatever it is called." * 9, "x.wav cannot be read as audio"),
        (None, "x.wav does not exist"),
    ],
)
def test_what_is_no_audio(tmp_path, content, message):
    path = tmp_path / "x.wav"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpeechError, match=message):
        read(path, RATE)
    with pytest.raises(SpeechError, match=message):
        list(blocks(str(path), RATE))


def test_more_that_is_no_audio(tmp_path, write):
    with pytest.raises(SpeechError, match="is not a file"):
        read(tmp_path, RATE)
    with pytest.raises(SpeechError, match="cannot be read: File name too long"):
        read(tmp_path / ("x" * 300), RATE)
    with pytest.raises(SpeechError, match="is empty: it has no samples"):
        read(write(samples=audio(0)), RATE)
    with pytest.raises(SpeechError, match="is empty: it has no samples"):
        read(Audio(np.zeros(0, np.float32), RATE), RATE)
    for bad in (np.nan, np.inf):
        samples = audio(100)
        samples[50] = bad
        path = write(samples=samples, subtype="FLOAT")
        for source in (path, Audio(samples[:, 0], RATE)):
            with pytest.raises(SpeechError, match="has samples that are not finite"):
                read(source, RATE)
    with pytest.raises(SpeechError, match=r"has samples beyond 1e\+06, where full scale is 1"):
        read(Audio(np.full(100, -1e17, np.float32), RATE), RATE)


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (audio(channels=2), RATE, r"samples must be floats \[n\] .*, got float32 \[8000, 2\]: take the mean"),
        (
            np.ones(RATE, np.int16),
            RATE,
            r"samples must be floats \[n\] .*, got int16 \[8000\]: .*divide integers",
        ),
        ([0.0, 1.0], RATE, r"samples must be floats \[n\] in \[-1, 1\], a numpy array, got list"),
        (audio()[:, 0], 0, "the audio must have a rate of at least 1,000 Hz to be heard, got 0: convert"),
    ],
)
def test_audio_in_memory_that_is_none(samples, rate, message):
    for wanted in (RATE, 16_000):
        with pytest.raises(SpeechError, match=message):
            read(Audio(samples, rate), wanted)


def test_a_rate_at_which_nothing_can_be_heard(write):
    with pytest.raises(
        SpeechError,
        match=r"a\.wav must have a rate of at least 1,000 Hz to be heard, got 1: convert it, .* or ffmpeg$",
    ):
        read(write(rate=1), RATE)
    with pytest.raises(SpeechError, match="got 999"):
        list(blocks(write(rate=999), RATE))
    assert len(read(write(rate=1_000), RATE)) == 8 * RATE


@pytest.mark.parametrize(("bits", "fits"), [(4, False), (8, True), (12, False), (20, False), (24, True)])
def test_bits_that_fill_no_bytes(tmp_path, bits, fits):
    """Programs disagree on where these bits stand in the bytes: misread, 12 bits are a 16th as loud."""
    size = -(-bits // 8)
    form = struct.pack("<IHHIIHH", 16, 1, 1, RATE, RATE * size, size, bits)
    data = b"data" + struct.pack("<I", 100 * size) + bytes(100 * size)
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" + struct.pack("<I", 28 + len(data)) + b"WAVEfmt " + form + data)
    if fits:
        assert len(read(path, RATE)) == 100
    else:
        with pytest.raises(
            SpeechError, match=rf"a\.wav must have samples of 8, 16, 24 or 32 bits, got {bits}: convert it"
        ):
            read(path, RATE)


def test_the_decoder_s_own_words_are_not_printed(write, capfd):
    """mpg123 writes to standard error about an MP3 file with a hole and one that is cut short."""
    path = write("a.mp3", audio(40_000), 16_000)
    content = path.read_bytes()
    for damaged in (content[:1_000] + bytes(400) + content[1_400:], content[: len(content) // 2]):
        path.write_bytes(damaged)
        assert 10_000 < len(read(path, 16_000)) < 40_000
        assert 10_000 < sum(map(len, blocks(path, 16_000))) < 40_000
    path.write_bytes(b"\xff\xfb\x90\x00" + b"x" * 400)
    with pytest.raises(SpeechError, match="cannot be read as audio"):
        read(path, 16_000)
    os.write(2, b"mine")
    assert capfd.readouterr().err == "mine"


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1, 2.0])
def test_another_speed(factor):
    faster = changed_speed(tone(1_000, 16_000), factor)
    wanted = tone(1_000 * factor, 16_000, 0.5 / factor)
    assert abs(len(faster) - 8_000 / factor) <= 1
    inside = slice(400, len(faster) - 400)
    np.testing.assert_allclose(faster[inside], wanted[inside], atol=1e-3)


def test_what_a_caller_gets_wrong(write):
    path = write()
    for factor in (0.0, -1.0, 11.0, float("nan")):
        with pytest.raises(ValueError, match=r"factor must be in 0\.1 \.\. 10, got"):
            changed_speed(audio()[:, 0], factor)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds must be more than 0"):
            blocks(path, RATE, seconds=seconds)
    with pytest.raises(ValueError, match="rate must be at least 1 Hz, got 0"):
        read(path, 0)


@pytest.mark.parametrize("name", ["soundfile", "soxr"])
def test_without_the_package(write, monkeypatch, name):
    path = write()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"speech needs {name} .*pip install 'lintra\[speech\]'"):
        read(path, 16_000)


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.aiff", "a.au", "a.caf", "a.mp3"])
def test_standard_error_is_left_alone_but_for_mp3(write, monkeypatch, name):
    """It belongs to the whole process: readers of other formats neither wait for it nor hide its output."""
    path = write(name)
    moved = []

    def dup2(old, new, real=os.dup2):
        moved.append(new)
        return real(old, new)

    monkeypatch.setattr(reader.os, "dup2", dup2)
    assert len(read(path, RATE)) >= RATE
    assert bool(moved) == (name == "a.mp3")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_does_not_wait_for_a_thread_it_does_not_have():
    with reader._ONE_AT_A_TIME:
        child = os.fork()
        if not child:
            os._exit(0 if reader._ONE_AT_A_TIME.acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0


def loud_then_quiet(seconds=12, rate=16_000):
    """Audio whose first MP3 frames are longer than the others."""
    sound = np.random.default_rng(0).standard_normal(rate * seconds) * 0.01
    sound[: 2 * rate] *= 30
    return sound.astype(np.float32)


def without_length(path, sound):
    """Write an MP3 without the frame that states its length."""
    soundfile.write(path, sound, 16_000, bitrate_mode="VARIABLE", compression_level=0.5)
    content = path.read_bytes()
    path.write_bytes(content[content.find(content[:2], 10) :])


def test_an_mp3_that_is_longer_than_it_seems_is_not_cut(tmp_path, monkeypatch):
    path, sound = tmp_path / "a.mp3", loud_then_quiet()
    without_length(path, sound)
    assert soundfile.info(path).frames < 8 * 16_000
    monkeypatch.setattr(decoder.shutil, "which", lambda name: None)
    with pytest.raises(SpeechError, match=r"it holds more than its header says .install ffmpeg"):
        read(path, 16_000)
    assert abs(streams.mp3_samples(path) - len(sound)) < 3_000


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_an_mp3_is_as_long_as_its_frames(tmp_path, rate, mode):
    path = tmp_path / "a.mp3"
    soundfile.write(path, loud_then_quiet(3, rate), rate, bitrate_mode=mode)
    assert 0 <= streams.mp3_samples(path) - soundfile.info(path).frames < 3_000
    assert len(read(path, rate)) == 3 * rate


@pytest.mark.parametrize("form", ["flac", "ogg", "opus", "mp3"])
def test_two_recordings_in_a_file_are_told(tmp_path, form, monkeypatch):
    monkeypatch.setattr(decoder.shutil, "which", lambda name: None)
    path, options = tmp_path / f"a.{form}", {"format": "OGG", "subtype": "OPUS"} if form == "opus" else {}
    soundfile.write(path, loud_then_quiet(3), 16_000, **options)
    assert len(read(path, 16_000)) == 3 * 16_000
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(SpeechError, match=r"another recording behind|more than its header"):
        read(path, 16_000)


def test_a_section_behind_the_end_of_an_mp3_is_refused(tmp_path):
    """This includes files whose apparent length is too long."""
    sound = audio(12 * 16_000)[:, 0]
    sound[: len(sound) // 2] = 0
    without_length(tmp_path / "a.mp3", sound)
    assert soundfile.info(tmp_path / "a.mp3").frames > 15 * 16_000
    with pytest.raises(SpeechError, match=r"a\.mp3 ends before 14 seconds"):
        read(tmp_path / "a.mp3", 16_000, start=14.0)


def test_sections_of_a_coding_without_places_are_read(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, loud_then_quiet(3), 16_000, subtype="GSM610")
    whole = read(path, 16_000)
    assert np.array_equal(read(path, 16_000, start=1.5, duration=1.0), whole[24_000:40_000])

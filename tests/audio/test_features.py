"""Filterbanks: those of Kaldi equal the definition, streaming equals the whole, and what is refused."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.audio import features
from lintra.audio.features import Config, Stream, compute, reference

# Kaldi computes in float32: an energy is accurate to about 1e-7 of the total energy of its frame, of which
# a bin may hold a thousandth here.
TOLERANCE = 1e-3


def audio(samples, seed=0, level=0.1):
    """Noise and a tone."""
    noise = np.random.default_rng(seed).normal(size=samples)
    return (level * (0.5 * noise + np.sin(np.arange(samples) * 0.3))).astype(np.float32)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(bins=80),
        Config(rate=8_000, bins=23, low_hz=0.0),
        Config(low_hz=130.0, high_hz=6_800.0, frame_ms=32.0),
        Config(rate=11_025, shift_ms=12.5),
        Config(rate=44_100, frame_ms=20.0, shift_ms=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", [1.0, 1e-2])
def test_kaldis_filterbank_is_the_definition(config, level):
    samples = audio(config.rate // 4 + 7, level=level)
    wanted = reference(samples, config)
    got = compute(samples, config)
    assert got.dtype == np.float32
    assert got.shape == (config.frames(len(samples)), config.bins)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, rtol=0)


def test_the_bin_of_a_tone_is_where_its_frequency_is():
    config = Config(bins=40)
    low, high = 1127 * np.log1p(np.array([20, 8_000]) / 700)
    edges = 700 * np.expm1(np.linspace(low, high, 42) / 1127)
    for bin in (5, 20, 35):
        tone = np.sin(2 * np.pi * edges[bin + 1] * np.arange(4_000) / config.rate).astype(np.float32)
        assert (compute(tone, config).argmax(1) == bin).all()


def test_silence_is_finite():
    np.testing.assert_array_equal(
        compute(np.zeros(800, np.float32), Config()), np.full((3, 40), np.log(features._FLOOR), np.float32)
    )


@given(st.integers(0, 100), st.integers(2, 60), st.integers(1, 60))
def test_the_number_of_frames_is_how_often_one_fits(samples, frame, shift):
    config = Config(rate=1_000, frame_ms=frame, shift_ms=min(shift, frame), kind="given")
    assert config.frames(samples) == sum(
        start + frame <= samples for start in range(0, samples + 1, config.shift)
    )


@settings(max_examples=25)
@given(st.lists(st.integers(0, 900), max_size=6), st.sampled_from([0.0, 1.0]))
def test_pieces_give_the_frames_of_the_whole(lengths, dither):
    config = Config(rate=8_000, bins=10, dither=dither)
    samples = audio(sum(lengths))
    stream, parts = Stream(config), np.split(samples, np.cumsum(lengths)[:-1])
    for _ in range(2):  # a finished stream is as good as new
        pieces = [stream.push(part) for part in parts]
        np.testing.assert_array_equal(np.concatenate([*pieces, stream.finish()]), compute(samples, config))


def test_a_stream_keeps_less_than_a_frame():
    stream = Stream(Config())
    for _ in range(50):
        stream.push(audio(3_210))
        assert len(stream._left) < stream.config.frame
        assert stream._left.base is None  # and keeps no longer array alive


def test_dither_is_the_same_each_time_and_of_its_size():
    samples, config = audio(1_600), Config(dither=1.0)
    np.testing.assert_array_equal(compute(samples, config), compute(samples, config))
    assert not np.array_equal(compute(samples, config), compute(samples, Config()))
    silent = np.zeros(160_000, np.float32)
    noise = np.random.default_rng(1).normal(size=160_000).astype(np.float32) / 32_768
    # Both are averages of about 1,000 frames.
    np.testing.assert_allclose(compute(silent, config).mean(0), compute(noise, Config()).mean(0), atol=0.2)


def test_audio_shorter_than_a_frame_has_none():
    for n in (0, 1, 399):
        assert compute(audio(n), Config()).shape == (0, 40)
        assert reference(audio(n), Config()).shape == (0, 40)
    assert compute(audio(400), Config()).shape == (1, 40)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "mfcc"}, TypeError, "kind must be 'fbank' or 'given', got 'mfcc'"),
        ({"rate": 0}, ValueError, "rate must be at least 1, got 0"),
        ({"rate": 16e3}, TypeError, "rate must be int"),
        ({"bins": 0}, ValueError, "bins must be at least 1, got 0"),
        ({"bins": 2}, ValueError, "bins must be at least 3.*; got 2"),
        ({"bins": 128}, ValueError, "each holds a frequency of a frame of 400 samples; got 128"),
        ({"frame_ms": float("nan")}, ValueError, "frame_ms must be finite"),
        ({"frame_ms": 0.1}, ValueError, "must be at least 2 samples of 16000 Hz.*got 0.1 and 10.0 ms"),
        ({"shift_ms": -10.0}, ValueError, "shift_ms from 1 sample to a frame; got 25.0 and -10.0 ms"),
        ({"shift_ms": 25.1}, ValueError, "shift_ms from 1 sample to a frame; got 25.0 and 25.1 ms"),
        ({"low_hz": -1.0}, ValueError, "low_hz must be at least 0, got -1"),
        ({"low_hz": 8_000.0}, ValueError, "low_hz must be below high_hz.*got 8000 and 8000"),
        ({"high_hz": 8_001.0}, ValueError, "at most half the rate, 8000 Hz; got 20 and 8001"),
        ({"dither": -1.0}, ValueError, "dither must be at least 0"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((800, 2), np.float32), r"must be floats \[n\] in \[-1, 1\], got float32 \[800, 2\]"),
        (np.zeros(800, np.int16), "must be floats .* got int16"),
        (np.full(800, np.nan, np.float32), "must be finite"),
    ],
)
@pytest.mark.parametrize("function", [compute, reference])
def test_what_is_no_audio(function, samples, message):
    with pytest.raises(ValueError, match=message):
        function(samples, Config())


def test_given_features_are_not_computed():
    with pytest.raises(ValueError, match="features of kind 'given' come as arrays"):
        compute(audio(800), Config(kind="given", bins=13))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kaldi_native_fbank", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lintra\[speech\]'"):
        compute(audio(800), Config())
    assert reference(audio(800), Config()).shape == (3, 40)

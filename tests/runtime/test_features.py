"""The runtime's features compared with those of the library: the float64 definition, and Kaldi's program."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra import runtime
from lintra.audio import features
from lintra.export import runtime as export
from lintra.runtime import Error, Model
from lintra.runtime.audio import Features, FilterbankConfig
from tests.runtime.recognisers import build, noise

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

CONFIGS = [
    features.Config(rate=8_000),  # the recogniser that comes with lintra
    features.Config(rate=16_000, bins=80),
    features.Config(rate=16_000, bins=23, low_hz=100.0, high_hz=7_600.0),
    features.Config(rate=44_100, bins=3, frame_ms=20.0, shift_ms=20.0, low_hz=0.0),
    features.Config(rate=1_000, bins=4, frame_ms=32.0, shift_ms=1.0),  # a frame length that is a power of two
    features.Config(rate=22_050, bins=40, frame_ms=46.44, shift_ms=11.61, low_hz=133.333),
]


def opened(config):
    return Features(Model(export.to_bytes(build(features=config))))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_definition(config, instruction_set):
    """To the rounding of the result. A bound in Hz is stored in float32, which shifts a filter by 1e-7."""
    samples = noise(config.frame + 6 * config.shift - 1)
    samples[: config.frame // 2] = 0  # includes digital silence
    mine, right = opened(config).push(samples), features.reference(samples, config)
    assert mine.shape == right.shape == (6, config.bins)
    assert np.abs(mine - right).max() < 1e-5


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_kaldi(config):
    """As near as `compute` is to its own reference."""
    samples = noise(8_000)
    assert np.abs(opened(config).push(samples) - features.compute(samples, config)).max() < 1e-3


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12))
@settings(max_examples=30)
def test_pieces_are_the_whole(sizes):
    samples = noise(sum(sizes))
    stream, whole = opened(CONFIGS[0]), opened(CONFIGS[0]).push(samples)
    parts = [stream.push(piece) for piece in np.split(samples, np.cumsum(sizes)[:-1])]
    assert np.array_equal(np.concatenate(parts), whole)
    assert len(whole) == CONFIGS[0].frames(len(samples))


@pytest.mark.parametrize("samples", [np.zeros(400), np.full(400, 1.0), np.full(400, 1e37)])
def test_nothing_is_heard_in_what_does_not_move(samples):
    """The energy is 0, with the logarithm of the floor; loud input leaves the rounding of its mean."""
    mine = opened(CONFIGS[0]).push(samples.astype(np.float32))
    assert np.isfinite(mine).all()
    if samples.max() <= 1:
        assert mine == pytest.approx(np.log(np.finfo(np.float32).eps))


def test_samples_that_are_none():
    stream, samples = opened(CONFIGS[0]), noise(400)
    stream.push(samples[:150])
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(Error, match="samples must be finite"):
            stream.push(np.append(samples[150:], wrong))  # none of it is processed
    with pytest.raises(Error, match=r"samples must be floats \[n\] in \[-1, 1\], got int16 \[3\]"):
        stream.push(np.ones(3, np.int16))
    with pytest.raises(Error, match=r"samples must be floats \[n\] .* got float32 \[1, 5\]"):
        stream.push(np.zeros((1, 5), np.float32))
    assert np.array_equal(stream.push(samples[150:]), opened(CONFIGS[0]).push(samples))


WRONG = [
    {"rate": 0},
    {"rate": 2**25},
    {"frame": 1},
    {"frame": 2**15 + 1},
    {"shift": 0},
    {"shift": 201},
    {"bins": 2},
    {"bins": 2**31},
    {"low_hz": -1.0},
    {"low_hz": 4_000.0},
    {"high_hz": 4_001.0},
    {"high_hz": float("nan")},
    {"low_hz": float("nan")},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_configurations_out_of_bounds(wrong):
    model = Model(export.to_bytes(build()))
    right = {"rate": 8_000, "bins": 10, "frame": 200, "shift": 80, "low_hz": 20.0, "high_hz": 4_000.0}
    sizes, memory = [], runtime.aligned(100_000)
    for given_ in (right, right | wrong):
        config = FilterbankConfig(**given_)
        sizes.append(model.library.lrt_features_size(ctypes.addressof(config)))
    assert sizes[0] > 0 == sizes[1]
    start = model.library.lrt_features_start
    with pytest.raises(Error, match="a size that is out of bounds"):
        model.check(start(memory.ctypes.data, len(memory), ctypes.addressof(config)))


def test_memory_that_does_not_do():
    model = Model(export.to_bytes(build()))
    address = model.library.lrt_features_of(model.address)
    size, memory = model.library.lrt_features_size(address), runtime.aligned(100_000)
    at, start = memory.ctypes.data, model.library.lrt_features_start
    assert start(at, size, address) == 0
    with pytest.raises(Error, match="too small"):
        model.check(start(at, size - 1, address))
    with pytest.raises(Error, match="multiple of 64"):
        model.check(start(at + 8, size, address))


def test_a_filter_without_a_frequency():
    """`lintra.audio.features` refuses such a filter; here, a file asks for it anyway."""
    model = Model(export.to_bytes(build()))
    config = FilterbankConfig(rate=8_000, bins=120, frame=200, shift=80, low_hz=20.0, high_hz=4_000.0)
    memory, address = runtime.aligned(200_000), ctypes.addressof(config)
    with pytest.raises(Error, match="a size that is out of bounds"):
        model.check(model.library.lrt_features_start(memory.ctypes.data, len(memory), address))

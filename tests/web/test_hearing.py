"""How the page hears: a resampler, and the recogniser in WebAssembly, which equals the library."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import soxr

from lintra import native, runtime, web
from lintra.export import runtime as export
from lintra.runtime import Model
from lintra.runtime.audio import Transcriber
from tests.runtime.recognisers import GIVEN, build, noise

HERE = Path(__file__).parent
PAGES = Path(web.__file__).parent
WASM = Path(runtime.__file__).parent / "lintra_runtime.wasm"
SOURCES = [PAGES / f"{name}.js" for name in ("worker", "runtime", "recogniser", "resample", "hearing")]
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript"),
    pytest.mark.usefixtures("one_thread"),
]


def in_javascript(pieces, **job):
    given = {"sources": list(map(str, SOURCES)), "pieces": [piece.tolist() for piece in pieces], **job}
    command = [str(NODE), str(HERE / "hearing.mjs")]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tones(rate, seconds=0.5):
    """Tones up to 0.88 of what 8,000 samples per second can hold, with silence at both ends."""
    time = np.arange(round(seconds * rate)) / rate
    edge = np.minimum(1, 20 * np.minimum(time, seconds - time)).clip(0)
    sound = sum(np.sin(2 * np.pi * hz * time + hz) for hz in (50, 440, 1_700, 3_500))
    return (0.2 * edge * sound).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000, 96_000, 44_101, 4_000])
def test_another_rate(rate):
    """As from soxr, and like the tones themselves: a tone loses less than a thousandth."""
    samples = tones(rate)
    pieces = np.split(samples, [0, 1, 7, 600, 611])
    once, again = map(np.array, in_javascript(pieces, rates=[rate, 8_000]))
    assert np.array_equal(once, again)
    assert len(once) == -(-len(samples) * 8_000 // rate)
    expected = soxr.resample(samples, rate, 8_000, quality="VHQ")
    assert len(expected) - 1 <= len(once) <= len(expected) + 1
    both = min(len(once), len(expected))
    assert np.abs(once[:both] - expected[:both]).max() < 1e-3
    if rate > 8_000:
        assert np.abs(once - tones(8_000)[: len(once)]).max() < 1e-3


def test_what_no_rate_holds_is_gone():
    """Otherwise a tone above the highest frequency would come back as a lower one."""
    time = np.arange(24_000) / 48_000
    sound = np.sin(2 * np.pi * 4_100 * time).astype(np.float32)
    once, _ = in_javascript([sound], rates=[48_000, 8_000])
    assert np.abs(once[200:-200]).max() < 1e-3


@pytest.fixture(
    scope="module", params=[("two to one", "float32"), ("gated", "float16"), ("hybrid", "float32")], ids=str
)
def model(request, tmp_path_factory):
    """The file of a recogniser with varied output, for each version of the format."""
    kind, weights = request.param
    file = tmp_path_factory.mktemp("model") / "model.lrt"
    export.write(build(kind), file, weights)
    return file


def listened(model, pieces, work, program=str(WASM)):
    return in_javascript(pieces, model=str(model), program=program, work=work)


def test_text_is_that_of_the_library(model):
    """Piece by piece, and again from the beginning."""
    if "baseline" not in native.instruction_sets():
        pytest.skip("the instruction sets of this processor have fused sums")
    pieces = np.split(noise(20_000), [3, 3, 1_000, 9_000, 19_990])
    with native.use("baseline"):
        transcriber = Transcriber(Model.open(model))
        expected = [transcriber.push(piece) for piece in pieces]
        expected.append(transcriber.finish())
    text = "".join(expected)
    assert len(text) > 5
    assert len(set(text)) > 1
    work = [{"do": "begin", "rate": 8_000}]
    work += [{"do": "hear", "piece": i, "rate": 8_000} for i in range(len(pieces))]
    work += [{"do": "finish"}]
    both = [each | {"job": job} for job in (1, 2) for each in work]
    ready, *told = listened(model, pieces, both)
    assert ready == {"told": "ready", "name": "node", "rate": 8_000}
    assert [each["text"] for each in told] == 2 * expected
    assert [each["done"] for each in told] == 2 * [*[False] * len(pieces), True]
    assert told[-1]["seconds"] == pytest.approx(2.5)


def test_a_file_is_its_pieces(model):
    """A stopped job, or another one, gets no further results."""
    samples = noise(20_000)
    work = [{"do": "begin", "job": 1, "rate": 8_000}, {"do": "hear", "job": 1, "piece": 0, "rate": 8_000}]
    work += [{"do": "finish", "job": 1}, {"do": "file", "job": 2, "rate": 8_000}]
    work += [{"do": "hear", "job": 2, "piece": 0, "rate": 8_000}, {"do": "begin", "job": 3, "rate": 8_000}]
    work += [{"do": "hear", "job": 4, "piece": 0, "rate": 8_000}, {"do": "stop"}, {"do": "finish", "job": 3}]
    _, *told = listened(model, [samples], work)
    texts = ["".join(each["text"] for each in told if each["job"] == job) for job in (1, 2)]
    assert texts[0] == texts[1]
    assert {each["job"] for each in told} == {1, 2}
    assert sum(each["done"] for each in told) == 2


def test_what_it_refuses(model, tmp_path):
    [told] = listened(model, [], [], program=None)
    assert told["reason"] == "this browser has no WebAssembly with SIMD, which the recogniser needs"
    export.write(build(features=GIVEN), tmp_path / "other.lrt")
    [told] = listened(tmp_path / "other.lrt", [], [])
    assert told["reason"] == "the model reads no audio"
    wrong = np.array([1e39, 0.5])  # infinite in float32
    work = [{"do": "begin", "job": 1, "rate": 8_000}, {"do": "hear", "job": 1, "piece": 0, "rate": 8_000}]
    _, told = listened(model, [wrong], work)
    assert told["told"] == "failed"

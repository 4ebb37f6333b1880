"""The C files by themselves: their functions, their programs under sanitizers, and in WebAssembly."""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from lintra import checkpoint, native, runtime
from lintra.export import runtime as export
from lintra.generation import generate
from lintra.generation.options import Sampler
from lintra.runtime import Model, Sequence
from lintra.runtime.audio import Transcriber
from tests.kinds import build
from tests.runtime import corpus
from tests.runtime.kinds import KINDS
from tests.runtime.recognisers import RECOGNISERS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "lintra/runtime/lintra_runtime.c"
AUDIO = SOURCE.with_name("lintra_audio.c")
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]
compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(compiler is None, reason="there is no C compiler")


def compiled(to, *sources, options=()):
    flags = [
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=fast",
        "-fno-math-errno",
        f"-I{SOURCE.parent}",
    ]
    subprocess.run([compiler, *flags, *options, "-o", to, *sources, "-lm"], check=True)
    return to


def said(*command, expect=0):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return done.stderr if expect else done.stdout


# Units in the last place; units of 1 for the far tails of gelu and for what is added to a logarithm: at sizes
# up to 80, a float keeps 4 such units. The tail of gelu, an exponential, multiplies roundings: 32 at x = -5.
BOUNDS = {"exponential": 1, "logarithm": 2, "sigmoid": 2, "gelu": 40, "far gelu": 4, "log sigmoid": 10}
BOUNDS |= {
    "softplus": 4,
    "one minus exp": 2,
    "subnormal gelu": 0,
    "infinite gelu": 0,
    "halves": 0,
    "sin_cos": 0.51,
}
# Each of three blocks becomes a float, and so does their sum; an integer keeps 9 bits more.
BOUNDS |= {"products": 1.5, "quantization": 0.51}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("options", [[], ["-march=native"]], ids=["baseline", "native"])
def test_functions_against_those_of_the_c_library(tmp_path, options):
    program = compiled(tmp_path / "functions", HERE / "functions.c", options=["-O2", *options])
    found = dict(line.rsplit(maxsplit=1) for line in said(program).splitlines())
    assert found.pop("no angle") == "1"
    assert found.pop("odd numbers") == "5"
    assert found.keys() == BOUNDS.keys()
    for name, bound in BOUNDS.items():
        assert float(found[name]) <= bound, name


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    options = [*SANITIZE, "-DMUTATE"]
    return compiled(tmp_path_factory.mktemp("fuzz") / "fuzz", HERE / "fuzz.c", SOURCE, AUDIO, options=options)


def results(printed):
    """How often each result occurred, by its number, and the number of inputs."""
    first, *lines = printed.splitlines()
    return {int(code): int(times) for code, times in map(str.split, lines)}, int(first.split()[1])


@pytest.mark.slow
@needs_compiler
def test_changed_files_under_sanitizers(fuzz, tmp_path):
    """One pass over the mutations of every kind. `make fuzz` searches for longer."""
    found, inputs = results(said(fuzz, 0.01, 1, *corpus.write(tmp_path)))
    assert inputs == (len(KINDS) + len(RECOGNISERS)) * 51
    # Bad magic, version, size, kind, sizes, numbers, padding, tokens, states, inputs, ends and full memory:
    # all of these must have occurred.
    assert {0, -1, -2, -3, -5, -6, -7, -8, -11, -18, -19, -21} <= found.keys()


@needs_compiler
def test_found_cases_under_sanitizers(fuzz):
    """Inputs that once failed still pass."""
    cases = sorted((HERE / "cases").iterdir())
    assert results(said(fuzz, 0, 0, *cases))[1] == len(cases)


@pytest.mark.slow
@needs_compiler
def test_changed_files_under_sanitizers_for_a_minute(fuzz, tmp_path):
    said(fuzz, 60, 2, *corpus.write(tmp_path))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "mnist-small.lrt"
    export.write(checkpoint.load("mnist-small"), file, "float16")
    return file


@needs_compiler
def test_the_example_draws_what_the_library_draws(small, tmp_path):
    program = compiled(tmp_path / "draw", ROOT / "examples/draw.c", SOURCE, options=["-O3"])
    kind, width, height, levels, *values = said(program, small, 3, 28).split()
    assert (kind, width, height, levels) == ("P2", "28", "28", "255")
    sequence, drawn = Sequence(Model.open(small)), [256]
    sequence.seed(3)
    while len(drawn) <= 784:
        sequence.step(drawn[-1])
        drawn.append(sequence.sample())
    # Its sums are rounded twice where those of the library may be rounded once: a draw falls between the
    # two in about one image in a thousand, but not in this one.
    assert list(map(int, values)) == drawn[1:]


@needs_compiler
def test_the_example_draws_what_the_command_line_draws(small, tmp_path):
    """The images of a seed, by number; a seed above 32 bits works too."""
    program = compiled(tmp_path / "draw", ROOT / "examples/draw.c", SOURCE, options=["-O3"])
    for seed, images in ((3, 3), (2**40 + 5, 1)):
        drawn = generate(checkpoint.load("mnist-small"), steps=784, seed=seed, batch=images)
        for number in {0, images - 1}:
            values = said(program, small, seed, 28, number).split()[4:]
            assert list(map(int, values)) == drawn[number].tolist()


@needs_compiler
def test_the_example_is_built_by_a_bare_compiler(small, tmp_path):
    """Without flags, and without the math library."""
    program = tmp_path / "draw"
    command = [compiler, f"-I{SOURCE.parent}", ROOT / "examples/draw.c", SOURCE, "-o", program]
    subprocess.run(command, check=True)
    assert said(program, small, 3, 28).startswith("P2 28 28 255\n")


@pytest.mark.slow
@needs_compiler
def test_what_the_example_refuses(small, tmp_path):
    program = compiled(tmp_path / "draw", ROOT / "examples/draw.c", SOURCE, options=SANITIZE)
    assert "no width of the model's images" in said(program, small, 3, 29, expect=1)
    assert "cannot be read" in said(program, tmp_path / "none", 3, 28, expect=1)
    (tmp_path / "short.lrt").write_bytes(small.read_bytes()[:1000])
    assert "shorter or longer" in said(program, tmp_path / "short.lrt", 3, 28, expect=1)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "spoken-digits.lrt"
    export.write(checkpoint.load("spoken-digits"), file, "float16")
    return file


def heard(program, file, samples, expect=0):
    done = subprocess.run([program, file], input=samples, capture_output=True)
    assert done.returncode == expect, done.stderr
    return (done.stderr if expect else done.stdout).decode()


@pytest.mark.slow
@needs_compiler
def test_the_example_hears_what_the_library_hears(spoken, small, tmp_path):
    """Under sanitizers: nothing is leaked, or read beyond the samples, the last of which fill no frame."""
    program = compiled(tmp_path / "hear", ROOT / "examples/hear.c", SOURCE, AUDIO, options=SANITIZE)
    recordings = sorted((ROOT / "tests/speech/data").glob("*.wav"))
    samples = b"".join(recording.read_bytes()[44:] for recording in recordings)  # without the headers
    for cut in (0, 2, 242, 642):
        given = samples[: len(samples) - cut]
        listener = Transcriber(Model.open(spoken))
        text = listener.push(np.frombuffer(given, np.int16).astype(np.float32) / 2**15) + listener.finish()
        assert heard(program, spoken, given) == text + "\n"
    assert text == "zero three seven"
    assert heard(program, spoken, b"") == "\n"
    assert "reads no audio" in heard(program, small, b"", expect=1)
    assert "cannot be read" in heard(program, tmp_path / "none", b"", expect=1)


node = shutil.which("node")
needs_node = pytest.mark.skipif(node is None, reason="there is no node to run WebAssembly")
CLANG = os.environ.get("CLANG", "clang-19")


LATER = ["gated", "delta", "kda, low rank", "ssd", "convolved linear"]  # version 2 of the format
LATER += ["softmax, rotary", "softmax, window", "hybrid", "hybrid of all"]  # version 3


def in_wasm(program, file, seed, tokens, *flags):
    return json.loads(said(node, *flags, HERE / "run.mjs", program, file, seed, *tokens))


@pytest.fixture(scope="module", params=["committed", "rebuilt"])
def wasm(request, tmp_path_factory):
    """A folder with two programs: those shipped, and those that `make wasm` builds from the source."""
    if request.param == "committed":
        return SOURCE.parent
    if shutil.which(CLANG) is None or shutil.which("make") is None:
        pytest.skip(f"there is no {CLANG} to make WebAssembly")
    folder = tmp_path_factory.mktemp("wasm")
    subprocess.run(
        ["make", "-s", "-C", ROOT, "wasm", f"CLANG={CLANG}", f"WASM={folder}"],
        check=True,
        capture_output=True,
    )
    return folder


@needs_node
@pytest.mark.parametrize("weights", export.WEIGHTS)
@pytest.mark.parametrize("kind", ["plain", "retention", "rfa", "mixture", "context", *LATER])
def test_webassembly_gives_what_the_baseline_gives(kind, weights, wasm, tmp_path):
    """To the bit: both use the same lanes in the same order, and neither has fused sums."""
    if "baseline" not in native.instruction_sets():
        pytest.skip("the instruction sets of this processor have fused sums")
    model = build(**KINDS[kind])
    export.write(model, tmp_path / "model.lrt", weights)
    tokens = [model.start_token, *range(model.config.vocabulary - 1)]
    found = in_wasm(wasm / "lintra_runtime.wasm", tmp_path / "model.lrt", 5, tokens)
    if "error" in found:  # it has too few positions for 40 more tokens
        assert found["error"] == "the model has no position for so many tokens"
        return
    with native.use("baseline"):
        sequence = Sequence(Model.open(tmp_path / "model.lrt"))
        sequence.seed(5)
        for token, params in zip(tokens, found["params"], strict=True):
            sequence.step(token)
            assert np.array_equal(np.float32(params), sequence.params().numpy())
        for token in found["drawn"]:
            assert sequence.sample(None, Sampler(temperature=0.9, top_p=0.95)) == token
            sequence.step(token)
        assert base64.b64decode(found["state"]) == sequence.save()
    assert found["same"] == [True] * (2 if weights == "float16" else 1)


@needs_node
def test_relaxed_webassembly(wasm, small):
    """Equal to the first, except for sums that this processor may round once or twice."""
    flag = "--experimental-wasm-relaxed-simd"
    if flag not in said(node, "--v8-options"):
        pytest.skip("this node has no relaxed SIMD")
    tokens = [256, 0, 3, 200]
    found = in_wasm(wasm / "lintra_runtime_relaxed.wasm", small, 5, tokens, flag)
    sequence = Sequence(Model.open(small))
    for token, params in zip(tokens, found["params"], strict=True):
        sequence.step(token)
        torch.testing.assert_close(torch.tensor(params), sequence.params(), rtol=1e-5, atol=1e-4)


@needs_node
def test_webassembly_refuses_what_is_damaged(small, tmp_path):
    content = bytearray(small.read_bytes())
    content[5000] ^= 1
    (tmp_path / "damaged.lrt").write_bytes(content)
    found = in_wasm(SOURCE.with_suffix(".wasm"), tmp_path / "damaged.lrt", 1, [256])
    assert found == {"error": "this is damaged: its checksum differs"}


def test_webassembly_is_small():
    for file in SOURCE.parent.glob("*.wasm"):
        assert file.stat().st_size <= 64 * 1024


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("source", [SOURCE, AUDIO], ids=lambda file: file.name)
@pytest.mark.parametrize(
    "flags", [["-O3", "-ffp-contract=fast", "-fno-math-errno"], []], ids=["fast", "plain"]
)
def test_nothing_is_asked_of_a_library(flags, source, tmp_path):
    """Compiled by itself, it needs only functions that move memory, and has no static variables."""
    program = tmp_path / "runtime.o"
    command = [compiler, "-std=c11", *flags, "-fno-stack-protector", "-c", source, "-o", program]
    subprocess.run(command, check=True)
    symbols = [line.split() for line in said("nm", program).splitlines()]
    wanted = {name for *_, kind, name in symbols if kind == "U"}
    assert wanted <= {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_"}
    assert not {name for *_, kind, name in symbols if kind in "bBdDcC"}

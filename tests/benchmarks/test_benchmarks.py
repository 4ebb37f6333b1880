"""The benchmarks run, count right and write down where their figures come from. No time is judged here."""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import (
    browser,
    drift,
    generation,
    gpu,
    gpu_recurrence,
    loads,
    predictions,
    recurrence,
    roofline,
    runtime,
    scale,
    softmax,
)
from benchmarks.__main__ import BENCHES, main
from lintra import checkpoint
from lintra.attention import linear
from lintra.bench.calls import modes
from lintra.bench.machines import Link, Links, Machine
from lintra.bench.reports import Row, checksum
from lintra.bench.step_plan import Plan
from lintra.bench.step_time import Step
from lintra.bench.step_work import Bytes, Work
from lintra.bench.timing import Timing
from lintra.cli.bench import ELSEWHERE
from lintra.export import runtime as export
from lintra.models import decoder
from lintra.runtime import Model
from lintra.tasks import copy, digits
from lintra.tasks.base import predict
from lintra.train import Config, Run

ROOT = Path(__file__).parents[2]


def test_what_finds_no_memory_on_a_gpu_is_left_out():
    def full():
        raise torch.OutOfMemoryError

    def step():
        pass

    made, rows = gpu.made({"a": lambda: step, "b": full, "c": lambda: step}, 80 * 10**9)
    assert made == {"a": step, "c": step}
    assert rows == [Row("b: left out, out of memory, had", 80, "GB")]


@pytest.mark.slow
@pytest.mark.skipif(browser.why_not() is not None, reason=str(browser.why_not()))
def test_a_page_that_fails_ends_the_wait():
    with browser.launched() as chromium:
        page = chromium.new_page()
        page.set_content("<p id='status'>drawing</p>")
        assert runtime._wait(page, "6 * 7") == 42
        page.set_content("<p id='status' class='wrong'>the model is damaged</p>")
        with pytest.raises(Exception, match="the model is damaged"):
            runtime._wait(page, "globalThis.never")


def test_figures_of_a_gpu():
    """At exactly the bandwidth every bound is met; a peer that takes twice as long gives 2."""
    sizes = gpu.QUICK
    tensor = sizes.batch * sizes.tokens * sizes.heads * sizes.dim * 2
    width = sizes.model.width // 8
    states = 2 * 4 * 2 * sizes.model.layers * 8 * width * (width + 1)  # of 2 sequences, read and written
    taken = {
        "copy": 2 * sizes.copied / 1e9,  # 1 GB/s
        "linear forward": 4 * tensor / 1e9,
        "linear forward + backward": 8 * tensor / 1e9,
        "flash-linear-attention forward + backward": 16 * tensor / 1e9,
        "step of 2": 2 * 4 * 2 * sizes.heads * sizes.dim * (sizes.dim + 1) / 1e9,
        "step of 2, bfloat16 state": 2 * 2 * 2 * sizes.heads * sizes.dim * (sizes.dim + 2) / 1e9,
        "decoding 2": 1.0,
        "decoding 2, CUDA graph": states / 1e9,
        "decoding 2, CUDA graph, bfloat16 state": states / 2e9,
        "training, linear": 0.5,
    }
    for tokens, ratio in zip(sizes.lengths, (0.5, 2.0), strict=True):
        taken[f"linear at {tokens} forward + backward"] = 1.0
        taken[f"softmax at {tokens} forward + backward"] = ratio
    rows = {row.what: row for row in gpu._rows({n: Timing((s, s), 1) for n, s in taken.items()}, sizes)}
    expected = {
        "copy": 1,
        "forward: time / that of its bytes": 1,
        "forward + backward: time / that of its bytes": 1,
        "forward + backward: flash-linear-attention / linear": 2,
        "shortest that is ahead of softmax": sizes.lengths[1],
        "step of 2: of the state's bound": 100,
        "step of 2, bfloat16 state: of the state's bound": 100,
        "decoding, best: of the state's bound": 100,
        "decoding 2, CUDA graph, bfloat16 state": 4e9 / states,
        "training, linear": sizes.model.batch * sizes.model.tokens / 0.5,
    }
    assert {name: rows[name].figure for name in expected} == pytest.approx(expected)
    taken[f"linear at {sizes.lengths[1]} forward + backward"] = 3.0  # slower than softmax at every length
    rows = {row.what: row for row in gpu._rows({n: Timing((s, s), 1) for n, s in taken.items()}, sizes)}
    assert rows["shortest that is ahead of softmax"].figure == 2 * sizes.lengths[1]
    assert all(row.met is not False for row in rows.values())


def test_figures_of_recurrences_on_a_gpu():
    sizes = gpu_recurrence.QUICK
    name = f"delta at {sizes.lengths[0]}"
    taken = {f"{name}, forward": 2.0, f"{name}, FLA, forward": 3.0, "KDA, step of 2": 1.0}
    figures = {row.what: row.figure for row in gpu_recurrence.rows(taken, sizes)}
    expected = {f"{name}, forward": 2000, f"{name}, forward: FLA / lintra": 1.5, "KDA, step of 2": 1e6}
    assert figures == pytest.approx(expected)


def test_a_peer_that_is_missing_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    assert gpu_recurrence.fla("KDA") == (None, "import of fla.ops.kda halted; None in sys.modules")


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Have the recurrences that are timed on a GPU run on the CPU, and without CUDA graphs."""
    monkeypatch.setattr(gpu_recurrence, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_recurrence, "record", lambda function: function)
    monkeypatch.setattr(gpu, "check", lambda name: None)
    monkeypatch.setattr(gpu, "describe", dict)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0))


def broken(*inputs):
    raise RuntimeError("no such kernel\nfor this GPU")


@pytest.mark.usefixtures("one_thread", "no_gpu_needed")
def test_recurrences_on_a_gpu_are_measured_before_their_peers(monkeypatch, capsys):
    """lintra, PyTorch, FLA; a rule's ratios are of one run; what fails at the end leaves out itself alone."""
    peers = {"delta": (gpu_recurrence.attend("delta"), None), "KDA": (broken, None)}
    monkeypatch.setattr(gpu_recurrence, "fla", lambda rule: peers.get(rule, (None, "not there")))
    sizes, seen = gpu_recurrence.QUICK, []
    found = list(gpu_recurrence.stages(sizes, seen.append))
    every = [[name for name in timings if "PyTorch" in name or "FLA" in name] for _, timings, _ in found]
    assert [len(names) for names in every] == [0, 0, 0, 0, 2, 4, 6, 8, 8, 10, 10, 10]
    assert seen == sorted(seen)
    assert seen[-1] <= sizes.turns

    rows, timings, details = found[-1]
    ratio = "delta at 128, forward: FLA / lintra"
    assert {row.what for row in rows} > {ratio, "gated at 128, forward: PyTorch / lintra", "KDA, step of 2"}
    apart = {
        "gated": "not there",
        "delta": 0,
        "gated delta": "not there",
        "KDA": "RuntimeError: no such kernel",
    }
    assert details["FLA / lintra - 1, of the largest y"] == apart
    assert [details["complete"] for _, _, details in found] == [False] * 11 + [True]
    printed = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[0] for line in printed if line.endswith(" ms")] == list(timings)
    assert "KDA: not beside flash-linear-attention: RuntimeError: no such kernel" in printed


@pytest.mark.usefixtures("one_thread", "no_gpu_needed")
def test_what_was_measured_is_kept_at_an_early_end(monkeypatch, tmp_path):
    def interrupted(rule):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_recurrence, "fla", interrupted)
    path = tmp_path / "result.json"
    assert main(["gpu_recurrence", "--quick", "--out", str(path)]) == 130
    report = json.loads(path.read_text())
    assert report["complete"] is False
    assert "KDA at 128, forward: PyTorch / lintra" in {row["what"] for row in report["rows"]}
    assert report["checksum"] == checksum(report)
    assert list(tmp_path.iterdir()) == [path]


def test_rounding_at_random_is_to_a_neighbour_and_right_in_the_mean():
    """Over 100,000 draws, to within 4 standard deviations."""
    x = torch.tensor([1 + 2**-9, -3.0 - 2**-8, 2.0 - 2**-10, 0.0])
    found = drift._at_random(x.expand(100_000, 4).contiguous(), torch.Generator().manual_seed(0)).double()
    low = torch.tensor([1.0, -3.0 - 2**-6, 2.0 - 2**-7, 0.0]).double()
    step = torch.tensor([2**-7, 2**-6, 2**-7, 0.0]).double()
    assert ((found == low) | (found == low + step)).all()
    assert ((found.mean(0) - x).abs() <= 4 * step / 2 / 100_000**0.5).all()
    assert torch.equal(found.bfloat16().double(), found)


@pytest.mark.usefixtures("one_thread")
def test_the_drift_of_a_state():
    """float32 is right; rounded states are off by what rounding can do, and the turns are counted."""
    seen = []
    rows, _ = drift.run(drift.QUICK, seen.append)
    assert seen == list(range(1, drift.QUICK.turns + 1))
    figures = {row.what: row.figure for row in rows}
    for name in drift.contestants(drift.QUICK):
        exact, *rounded = (figures[f"{name}, {way}, 16 tokens"] for way in drift.WAYS)
        assert exact < 1e-3
        assert all(1e-3 < each < 10 for each in rounded)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path, capsys):
    path = tmp_path / "result.json"
    for name in ("gpu", "gpu_recurrence"):
        assert main([name, "--quick", "--out", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"benchmarks: no GPU: python -m benchmarks {name} needs one")
    script = ROOT / "benchmarks" / "gpu.sh"
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "benchmarks/gpu.sh: no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("one_thread")
def test_a_computation_is_held_against_what_bounds_it():
    """Per float32 number of a head of d: d operations for 4 tensors, 3.5 d for 12; softmax has t / 2 instead
    of d; decoding has two for each number of a state that is read and written."""
    sizes = roofline.QUICK
    rows, _ = roofline.run(sizes, lambda done: None)
    figures = {row.what: row.figure for row in rows}
    d, t = sizes.dim, sizes.tokens
    assert figures["forward: intensity"] == d / 4
    assert figures["forward + backward: intensity"] == pytest.approx(14 * d / 48)
    assert figures["softmax, forward: intensity"] == (t + 1) / 8
    for batch in sizes.batches:
        assert figures[f"decode, {batch}: intensity"] == 0.5
    for name in ("forward", "softmax, forward + backward", "decode, 2"):
        bound = min(figures["matmul"], figures["copy"] * figures[f"{name}: intensity"])
        assert figures[f"{name}: of its bound"] == pytest.approx(100 * figures[f"{name}: rate"] / bound)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "what",
    [
        "train",
        pytest.param("recurrence", marks=pytest.mark.slow),
        "busy",
        "softmax",
        "decode",
        "drift",
        "model",
        "predictions",
        "roofline",
        pytest.param("scale", marks=pytest.mark.slow),
        "generation",
        pytest.param("runtime", marks=pytest.mark.slow),
        pytest.param("scaling --peers", marks=pytest.mark.slow),
        pytest.param("onnx", marks=pytest.mark.slow),
        pytest.param("journeys", marks=pytest.mark.slow),
        pytest.param("stream", marks=pytest.mark.slow),
    ],
)
def test_the_command_writes_what_it_prints(what, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert main([*what.split(), "--quick", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["command"] == f"python -m benchmarks {what} --quick --out {path}"
    assert str(path) in printed
    assert all(row["what"] in printed and row["figure"] == row["figure"] for row in report["rows"])
    for timing in report["timings_in_seconds"].values():
        assert timing["median"] == statistics.median(timing["seconds"])


def test_what_one_process_takes_is_what_the_calibrated_model_gives():
    """Times proportional to the operations are recovered; a machine is calibrated on the parts alone."""
    load = loads.Load(layers=2, heads=2, width=16, length=64)
    work, links = Work(load.config()), Links.alike(Link(1e-4, 1e9))
    seconds = {}
    for parts in scale.PARTS:
        sequences, length = load.part(parts)
        shape = {"length": length, "sequences": sequences, "recompute": False}
        machine = Machine(
            operations=1e9,
            launch=0.01,
            memory=0,
            memory_bandwidth=1,
            node=1,
            inside=links,
            between=links,
            cores=1,
        )
        update = work.update_bytes(1, Bytes())
        seconds[parts] = Step(work=work, machine=machine, plan=Plan(), **shape).seconds - update
    found = scale.calibrated(work, load, seconds, update / 1e8, links, 1.0)
    assert found.operations == pytest.approx(1e9)
    assert found.launch == pytest.approx(0.01)
    assert found.memory_bandwidth == pytest.approx(1e8)


def test_a_machine_that_is_faster_on_less_starts_at_nothing():
    """A start-up time below 0, as noise can give, becomes 0; the rate is then that of all parts together."""
    load = loads.Load()
    work = Work(load.config())
    operations = {each: scale._operations(work, *load.part(each)) for each in scale.PARTS}
    seconds = {each: x / 1e9 - 1 for each, x in operations.items()}
    found = scale.calibrated(work, load, seconds, 1.0, Links.alike(Link(0, 1)), 1.0)
    assert found.launch == 0
    assert found.operations == pytest.approx(1e9, rel=0.05)


def test_parts_of_a_batch_are_sequences_or_pieces_of_them():
    assert loads.Load(sequences=4, length=64).part(2) == (2, 64)
    assert loads.Load(sequences=1, length=64, strategies=("context",)).part(2) == (1, 32)


def test_the_models_of_predictions_are_as_large_as_their_names():
    sizes = {"the paper's": 6.4e6, "1 B": 1.01e9, "70 B": 69e9}
    for name, parameters in sizes.items():
        assert Work(predictions.config(name, "linear")).parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.usefixtures("one_thread")
def test_rounded_weights_are_scored_on_images_only(tmp_path, capsys):
    """On as many images as there are; a run on anything else is refused before anything is timed."""
    args = ["generation", "--quick", "--model"]
    for task in (digits.Config(), copy.Config(length=16)):
        model = dataclasses.replace(task.build().model(linear.Config()), layers=1, heads=2, width=16)
        run = Run.create(tmp_path / task.build().name, task=task, model=model, train=Config())
        checkpoint.save(model.build(), run.folder / "step-00000001")
    assert main([*args, str(tmp_path / "digits")]) == 0
    assert "loss on 2 images, int8" in capsys.readouterr().out
    assert main([*args, str(tmp_path / "copy")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"model must be a run on images, {tmp_path / 'copy'} is of the task copy" in err


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.usefixtures("one_thread")
def test_bits_of_steps_are_those_of_the_parallel_form(start):
    torch.manual_seed(0)
    model = decoder.Config(vocabulary=5, layers=1, heads=2, width=8, start=start).build().eval()
    tokens = torch.randint(0, 5, (3, 9))
    with torch.no_grad():
        found = generation._bits(model.extend, model, model.start(3), tokens)
        right = -predict(model, {"tokens": tokens})[1].mean().item() / math.log(2)
    assert found == pytest.approx(right, rel=1e-5)  # sums of float32 in another order


def test_what_a_step_reads():
    model = decoder.Config(vocabulary=5, layers=2, heads=2, width=8, norm="post", final_norm=True).build()
    assert generation._read(model) == sum(x.numel() for x in model.parameters()) - 6 * 8
    assert generation.Sizes(tokens=100, parts=4).positions == (12, 37, 62, 87)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("start", [True, False])
def test_bits_of_the_runtime_are_those_of_the_parallel_form(start):
    torch.manual_seed(0)
    model = decoder.Config(vocabulary=5, layers=1, heads=2, width=8, start=start).build().eval()
    tokens = torch.randint(0, 5, (3, 9))
    found = runtime._bits(model, Model(export.to_bytes(model)), tokens)
    with torch.no_grad():
        right = -predict(model, {"tokens": tokens})[1].mean().item() / math.log(2)
    assert found.shape == (3,)
    assert found.mean().item() == pytest.approx(right, rel=1e-5)  # sums of float32 in another order


def test_what_rounding_costs_is_judged_by_the_differences_of_images():
    mean, error = runtime.lost("int8", torch.tensor([0.001, 0.003, 0.002, 0.002]).double())
    assert mean.figure == pytest.approx(2)
    assert mean.met
    assert error.figure == pytest.approx(1e3 * ((2 * 0.001**2) / 3 / 4) ** 0.5)
    assert not runtime.lost("int8", torch.full((4,), 0.004))[0].met


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(browser, "_chromium", lambda: None)
    assert [x for x in runtime.left_out() if "Chromium" in x] == [
        "Chromium is left out: there is no Chromium to open pages with: apt-get install chromium"
    ]


@pytest.mark.parametrize("name", BENCHES)
def test_what_a_benchmark_measures_is_there(name):
    assert all((ROOT / path).exists() for path in import_module(f"benchmarks.{name}").MEASURES)


def test_the_fallbacks_of_transformers_are_its_own():
    """Whatever was imported before: the kernels of a package, which need a GPU, may wrap these functions."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    names = [name for name in dir(module) if name.startswith("torch_")]
    assert names
    for name in names:
        found = recurrence.fallback("qwen3_next", name)
        assert found.__code__.co_filename == module.__file__, name


def test_lintra_bench_says_where_all_of_them_are():
    assert {*ELSEWHERE, "scaling"} <= BENCHES.keys()


@pytest.mark.parametrize("causal", [True, False])
def test_operations_of_mechanisms_that_see_all_keys_are_those_of_softmax(causal):
    """14 d per pair; Performer has 6 for each multiply-add of its four products with the features."""
    t, d = 64, 8
    everything = softmax.operations_of("softmax", causal, t, d)
    assert everything == 14 * d * (t * (t + 1) // 2 if causal else t**2)
    for name in ("longformer", "bigbird"):  # a window of 256, blocks of 64
        assert softmax.operations_of(name, causal, t, d) == everything
    assert softmax.operations_of("performer", causal, t, d) == 6 * 4 * t * d * int(d * math.log(d))


def test_operations_of_sparse_mechanisms_grow_with_the_length():
    """The operations of softmax grow with its square, and so does a part of those of causal Long-Short."""
    for name in softmax.NAMES:
        for causal in modes(name):
            short, long = (softmax.operations_of(name, causal, t, 64) for t in (4096, 8192))
            assert 1.99 * short < long < (3.1 if name == "longshort" and causal else 2.1) * short, name

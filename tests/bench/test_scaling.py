"""The scaling figure: known exponents, points that do not fit, libraries that are not installed."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lintra.bench import memory, points, scaling
from lintra.bench.points import FUSED, WRITTEN_OUT, Cost
from lintra.bench.reports import Row
from lintra.cli import main

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there a process can be refused memory")
LENGTHS = tuple(2**i for i in range(9, 17))


@pytest.mark.parametrize("a", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(a):
    line = {n: 3.7 * n**a for n in LENGTHS}
    assert scaling.exponent(line, 512) == pytest.approx(a, abs=1e-9)  # logarithms, to rounding


def test_short_sequences_do_not_count_for_the_exponent():
    line = {n: max(n, 2048.0) for n in LENGTHS}
    assert scaling.exponent(line, 2048) == pytest.approx(1, abs=1e-9)
    assert scaling.exponent(line, 512) < 0.9
    assert scaling.exponent(line, 65536) is None


def test_the_crossover_is_where_a_line_stays_below():
    exact = {1: 1.0, 2: 4.0, 4: 16.0, 8: 64.0}
    assert scaling.crossover({1: 0.5, 2: 5.0, 4: 9.0, 8: 18.0}, exact) == 4
    assert scaling.crossover({1: 2.0, 2: 5.0, 4: 17.0, 8: 65.0}, exact) is None
    assert scaling.crossover({2: 1.0, 16: 1000.0}, exact) == 2


def sweep(cost, who="linear", most=10**9, lengths=(512, 1024, 2048), others=(), **sizes):
    return scaling.sweep(who, scaling.Sizes(lengths=lengths, tokens=512, **sizes), most, cost, others)


@pytest.mark.parametrize(("who", "grown"), [(WRITTEN_OUT, 16), (FUSED, 4**1.2), ("linear", 4**1.2)])
def test_a_point_that_would_need_too_much_memory_is_left_out_and_reported(who, grown):
    asked = []

    def cost(point, most):
        asked.append(point.tokens)
        return Cost(0.001, 10**8)

    costs, rows = sweep(cost, who, most=3 * 10**8, lengths=(512, 2048))
    assert asked == list(costs) == [512]
    assert rows[0].what == f"{who}, 2,048 tokens: left out, may need 0.3 GB, likely"
    assert rows[0].figure == pytest.approx(0.1 * grown)


@pytest.mark.parametrize(("who", "measured"), [(FUSED, [512, 1024]), ("linear", [512, 1024, 2048])])
def test_a_point_that_would_take_too_long_is_left_out_and_reported(who, measured):
    costs, rows = sweep(lambda point, most: Cost(point.tokens / 512, 1), who, seconds=5.0)
    assert list(costs) == measured
    assert [row.what for row in rows] == [f"{who}, 2,048 tokens: left out, may take 5 s, likely"] * (
        3 - len(measured)
    )
    assert all(row.figure == 2.0 * 4 for row in rows)


def test_what_is_predicted_is_the_cost_of_the_whole_call():
    """4 sequences of 512 tokens, then 1 of 2,048: softmax takes 4 times as long, not 16 times."""
    sizes = scaling.Sizes(lengths=(512, 2048), tokens=2048, seconds=0.0)
    _, rows = scaling.sweep(FUSED, sizes, 10**9, lambda point, most: Cost(1.0, 1))
    assert [row.figure for row in rows] == [4.0]


def test_the_sweep_goes_on_after_a_point_that_ran_out_of_memory():
    def cost(point, most):
        if point.tokens == 1024:
            raise MemoryError("too much")
        return Cost(0.001, 1)

    costs, rows = sweep(cost)
    assert list(costs) == [512, 2048]
    assert rows == [Row("linear, 1,024 tokens: left out, out of memory, had", 1.0, "GB")]


def test_another_failure_is_an_error_here_and_a_row_for_others():
    def cost(point, most):
        raise RuntimeError("TypeError: no")

    with pytest.raises(RuntimeError, match="TypeError: no"):
        sweep(cost)
    costs, rows = sweep(cost, "linformer-pytorch", others=["linformer-pytorch"])
    assert not costs
    assert [row.what.partition(" after")[0] for row in rows] == [
        f"linformer-pytorch, {n} tokens: left out, fails with TypeError: no;"
        for n in ("512", "1,024", "2,048")
    ]


def test_the_sweep_of_the_memory_is_progress_too(monkeypatch):
    monkeypatch.setattr(scaling, "sweep", lambda who, *sizes: ({64: Cost(0.001, 1)}, []))
    seen = []
    scaling.run(replace(scaling.QUICK, lengths=(64,)), seen.append)
    assert seen == list(range(1, scaling.QUICK.turns + 1))


@pytest.mark.parametrize("free", [10**9, None])
def test_a_call_may_need_a_part_of_the_memory_that_is_free(monkeypatch, free):
    """The limit of a container counts, since `available` knows it; otherwise half of all memory is taken."""
    given = []
    monkeypatch.setattr(scaling, "available", lambda device: free)
    monkeypatch.setattr(
        scaling, "sweep", lambda who, sizes, most, *_: given.append(most) or ({64: Cost(0.001, 1)}, [])
    )
    scaling.run(replace(scaling.QUICK, lengths=(64,)), lambda done: None)
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert set(given) == {int(scaling.FREE * (free or half))}


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    "program",
    [
        "raise MemoryError",
        "grow_at_most(2**26)\nbytearray(2**28)",
        "import torch\ngrow_at_most(2**26)\ntorch.ones(2**27)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",  # as the system does when memory runs out
    ],
    ids=["raised", "refused", "refused to PyTorch", "killed"],
)
def test_a_process_out_of_memory(program):
    with pytest.raises(MemoryError):
        memory.printed_by(program)


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        memory.printed_by("raise ValueError('no such thing')")


@LINUX
def test_the_peak_is_counted_from_where_it_was_forgotten():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot forget a peak")
    program = "bytearray(2**27)\nforget_peak()\nbefore = peak()\nbytearray(2**26)\nprint(peak() - before)"
    # Linux counts pages in batches, a few hundred of them for each processor.
    assert 0.95 * 2**26 < memory.peak_of(program) < 2**27


@LINUX
@pytest.mark.slow
def test_scores_are_in_memory_only_where_they_are_written_out(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    sizes = scaling.Sizes(tokens=1024, heads=2, dim=16)
    scores = 4 * 2 * 1024**2  # bytes
    assert points.cost(sizes.point(WRITTEN_OUT, 1024), 2**30).size > 2 * scores  # and their gradients
    assert points.cost(sizes.point(FUSED, 1024), 2**30).size < scores
    with pytest.raises(MemoryError):
        points.cost(sizes.point(WRITTEN_OUT, 4096), 16 * scores)


def told_of(first, later, monkeypatch, capsys):
    """What `tell` prints of calls that take so many seconds, the later ones after doing `later`."""
    clock = SimpleNamespace(now=0.0, left=[first, 9.0, 2.0])

    def call(point, inputs):
        def both():
            if point.tokens > 256:  # beyond the warm-up
                if len(clock.left) < 3:
                    later()
                clock.now += clock.left.pop(0)

        return both

    monkeypatch.setattr(points, "grow_at_most", lambda most: None)  # it would hold for this process,
    monkeypatch.setattr(points, "keep_freed_memory", lambda: None)  # as would this
    monkeypatch.setattr(points.time, "perf_counter", lambda: clock.now)
    points.tell(scaling.Sizes(tokens=512, heads=1, dim=1).point("linear", 512), 2**30, call)
    return json.loads(capsys.readouterr().out)


@LINUX
@pytest.mark.parametrize(("first", "told"), [(5.0, 2.0), (70.0, 70.0)])
def test_a_call_is_timed_again_unless_it_takes_a_minute(first, told, monkeypatch, capsys):
    """The first call gets fresh memory from the system: its time says little about the next."""
    assert told_of(first, lambda: None, monkeypatch, capsys)["seconds"] == told


@LINUX
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_call_that_cannot_be_repeated_keeps_its_first_time(error, monkeypatch, capsys):
    """Memory that is kept may be in pieces, none of which is large enough for the next call."""

    def later():
        raise error

    assert told_of(5.0, later, monkeypatch, capsys)["seconds"] == 5.0


@LINUX
def test_a_repeated_call_that_fails_for_another_reason_is_an_error(monkeypatch, capsys):
    def later():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        told_of(5.0, later, monkeypatch, capsys)


def test_lines_are_the_points_among_the_rows():
    rows = [
        Row("softmax, SDPA, 1,024 tokens: time", 3.0, "ms"),
        Row("softmax, SDPA, 1,024 tokens: memory", 4.0, "MB"),
        Row("softmax, SDPA, 65,536 tokens, one call: time", 5.0, "ms"),
        Row("lsh-1, 65,536 tokens: left out, may take 5 s, likely", 6.0, "s"),
        *scaling._growth([Row(f"linear, {n} tokens: time", float(n), "ms") for n in (1, 2)], scaling.QUICK),
    ]
    rows += scaling._ratios(
        [Row(f"{who}, 128 tokens: time", 1.0, "ms") for who in (FUSED, "linear")], scaling.QUICK, {}
    )
    assert len(rows) == 6
    assert scaling.lines(rows, "time") == {"softmax, SDPA": {1024: 3.0}}
    assert scaling.lines(rows, "memory") == {"softmax, SDPA": {1024: 4.0}}


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "scaling", "--quick", "--device", "cuda"]) == 2
    assert "device is cuda, but PyTorch finds no GPU here" in capsys.readouterr().err

"""`python -m benchmarks softmax`: softmax over a few of the keys, beside PyTorch's over all.

All are in one interleaved run: the ops alone, whose pairs of a query and a key are counted, and the
mechanisms around them with their default `Config`, for which the products with features, summaries and
hashes are counted too. The ratio of what softmax over all keys computes to what is counted bounds how many
times as fast a call can be at the rate of PyTorch's kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lintra import ops
from lintra.attention import bigbird, for_length, load, longshort, lsh
from lintra.bench import calls, training_step
from lintra.bench.mechanisms import CAUSAL
from lintra.bench.reports import Row
from lintra.bench.timing import Timing, interleaved
from lintra.ops.lsh import columns

MEASURES = ("lintra/native", "lintra/ops", "lintra/attention")
NAMES = ("longformer", "bigbird", "longshort", "lsh", "performer")
PASSES = {"forward": 1.0, "forward + backward": 3.5}  # products for a pair; the forward has two of them
ENOUGH = 6.0  # times as fast as softmax over all keys; a mechanism below it should reach 70 % of its bound
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work that is timed."""

    tokens: int = 4096
    heads: int = 8
    dim: int = 64
    window: int = 256  # of the bands, as in longformer
    rounds: int = 9


QUICK = Sizes(tokens=128, heads=2, dim=16, window=16, rounds=2)


@dataclass
class Work:
    """Calls by name, and how many pairs of a query and a key each of the counted ones computes."""

    timed: dict[str, Call] = field(default_factory=dict)
    pairs: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, attend: calls.Attend, inputs: calls.Inputs, pairs: int) -> None:
        forward, both = calls.each_pass(attend, inputs)
        self.timed |= {f"{name}, forward": forward, f"{name}, forward + backward": both}
        self.pairs[name] = pairs


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Time everything -> the table's rows and the single timings."""
    inputs = calls.draw(1, sizes.tokens, sizes.heads, sizes.dim)
    work = Work({"matmul": training_step.matmul()})
    work.add("softmax", lambda q, k, v: calls.fused(q, k, v, causal=False), inputs, sizes.tokens**2)
    for before, after in ((sizes.window, sizes.window), (sizes.window, 0)):
        work.add(f"band {before} + {after}", *_band(before, after, inputs))
    work.add("segments", *_segments(sizes, inputs))
    work.add("blocks", *_blocks(sizes, inputs))
    for name in NAMES:
        for causal in calls.modes(name):
            work.timed[f"{name}, {CAUSAL[causal]}"] = calls.mechanism(name, inputs, causal=causal)
    exact = calls.passes(calls.fused, inputs)
    work.timed |= {"SDPA, causal": exact, "SDPA, bidirectional": work.timed["softmax, forward + backward"]}
    timings = interleaved(work.timed, rounds=sizes.rounds, at_least=0, progress=progress)
    return _rows({name: each.median for name, each in timings.items()}, work.pairs, sizes), timings


Counted = tuple[calls.Attend, calls.Inputs, int]


def _band(before: int, after: int, inputs: calls.Inputs) -> Counted:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.banded_attention(q, k, v, before=before, after=after).o

    return attend, inputs, band_pairs(inputs[0].shape[1], before, after)


def band_pairs(t: int, before: int, after: int) -> int:
    """Count the pairs of t queries and the keys up to so many places before and after them."""
    return sum(min(t - 1, i + after) - max(0, i - before) + 1 for i in range(t))


def _segments(sizes: Sizes, inputs: calls.Inputs) -> Counted:
    """The window of longshort in both directions."""
    segment = for_length(longshort.Config, sizes.tokens).window

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.segment_attention(q, k, v, segment=segment, side=(segment + 1) // 2).o

    return attend, inputs, segment_pairs(sizes.tokens, segment)


def segment_pairs(t: int, segment: int) -> int:
    """Count the pairs of t queries and the keys of their segment and half of one on each side."""
    side = (segment + 1) // 2
    starts = (i // segment * segment for i in range(t))
    return sum(min(t, i + segment + side) - max(0, i - side) for i in starts)


def _blocks(sizes: Sizes, inputs: calls.Inputs) -> Counted:
    """The lists of bigbird in both directions, without its global queries."""
    config = for_length(bigbird.Config, sizes.tokens)
    built = config.build(heads=sizes.heads, dim=sizes.dim, causal=False)
    blocks, listed = _lists(built, sizes.tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.block_attention(q, k, v, blocks, listed, block=config.block)

    return attend, inputs, int(listed.sum()) * config.block**2


def operations_of(name: str, causal: bool, tokens: int, dim: int) -> float:
    """Count the operations of a head in forward + backward of a mechanism with its default `Config`: 14 d a
    pair of a query and a key, and 6 a multiplication and addition of the other products (LSH's hash: 2, it
    has no backward).

    name: a mechanism of `NAMES`, or "softmax", which sees all keys. Norms, exponentials, masks and sorting
    are left out."""
    pairs, products, hashes = 0.0, 0.0, 0.0
    config = for_length(load(name).Config, tokens)
    if name == "softmax":
        pairs = band_pairs(tokens, tokens, 0 if causal else tokens)
    elif name == "longformer":
        pairs = band_pairs(tokens, config.window, 0 if causal else config.window)
    elif name == "bigbird":
        pairs = _bigbird_pairs(config, causal, tokens)
    elif name == "longshort":
        rank = config.segment_rank if causal else config.rank
        far = sum(i // config.segment for i in range(tokens)) if causal else tokens
        near = band_pairs(tokens, config.window - 1, 0) if causal else segment_pairs(tokens, config.window)
        pairs, products = near + rank * far, 3 * tokens * rank * dim
    elif name == "lsh":
        keys = config.chunk * (config.look_back + 1 + config.look_ahead)
        pairs = config.rounds * tokens * keys * (0.5 if causal else 1.0)
        hash_columns = sum(columns(lsh.highest_level(tokens, config.chunk)))
        hashes = config.rounds * tokens * dim * hash_columns
    elif name == "performer":
        products = 4 * tokens * dim * config.build(heads=1, dim=dim, causal=causal).features
    return 4 * dim * PASSES["forward + backward"] * pairs + 6 * products + 2 * hashes


def _bigbird_pairs(config: bigbird.Config, causal: bool, tokens: int) -> int:
    """Count the pairs of a head, including those of the global queries."""
    built = config.build(heads=1, dim=2, causal=causal)
    if tokens <= built.full * config.block:  # too few tokens for any other set than all of them
        return band_pairs(tokens, tokens, 0 if causal else tokens)
    listed = _lists(built, tokens)[1].sum(-1)[0, 0] * config.block**2
    if causal:
        return int(listed.sum()) + tokens * (config.block + 1) // 2
    least, most = config.left_blocks, len(listed) - built.right
    return int(listed[least:most].sum()) + (config.left_blocks + built.right) * config.block * tokens


def _lists(built: bigbird.BigBirdAttention, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the blocks that every block of queries sees, and which entries count."""
    row = torch.arange(tokens // built.config.block)[None]
    return built.lists(row, torch.full((1, 1), row.shape[1]))


def _rows(seconds: dict[str, float], pairs: dict[str, int], sizes: Sizes) -> list[Row]:
    rate = training_step.MATMUL_OPERATIONS / seconds["matmul"]
    rows = [Row(f"matmul {training_step.MATMUL}^3 float32", rate / 1e9, "GFLOP/s")]
    for name, count in pairs.items():
        rows.append(Row(f"{name}: keys of a query", count / sizes.tokens, ""))
        for passed, products in PASSES.items():
            time = seconds[f"{name}, {passed}"]
            operations = 4 * sizes.dim * products * count * sizes.heads
            rows.append(Row(f"{name}, {passed}", 1e3 * time, "ms"))
            rows.append(Row(f"{name}, {passed}: of matmul", 100 * operations / time / rate, "%"))
            if name != "softmax":
                ratio, bound = seconds[f"softmax, {passed}"] / time, pairs["softmax"] / count
                rows.append(Row(f"{name}, {passed}: SDPA softmax / it", ratio, "x"))
                rows.append(Row(f"{name}, {passed}: of its bound", 100 * ratio / bound, "%", 70))
    for name in NAMES:
        for causal in calls.modes(name):
            what = f"{name}, {CAUSAL[causal]}"
            ratio = seconds[f"SDPA, {CAUSAL[causal]}"] / seconds[what]
            rows.append(Row(f"{what}, forward + backward", 1e3 * seconds[what], "ms"))
            size = {"causal": causal, "tokens": sizes.tokens, "dim": sizes.dim}
            bound = operations_of("softmax", **size) / operations_of(name, **size)
            rows.append(Row(f"{what}, forward + backward: SDPA softmax / it", ratio, "x"))
            rows.append(Row(f"{what}, forward + backward: SDPA softmax / it, bound", bound, "x"))
            least = 70 if ratio < ENOUGH else None
            rows.append(Row(f"{what}, forward + backward: of its bound", 100 * ratio / bound, "%", least))
    rows.append(Row("threads", torch.get_num_threads(), ""))
    return rows

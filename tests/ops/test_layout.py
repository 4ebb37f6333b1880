"""Packed sequences: packing and padding are inverses of each other, and each sequence gives the same as
alone; what is refused."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.native import linear_attention as kernel
from lintra.ops import LinearState, causal_conv1d, linear_attention, selective_scan
from lintra.ops.layout import SHORT, Layout, sequence_bounds
from tests.ops.test_linear_attention import (
    COMPILED,
    COMPILERS,
    EXACT,
    FAST,
    accepted,
    draw,
    flat,
    needs_native,
    uneven,
)

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40, 70]), min_size=1, max_size=6)


def places(lengths, dtype=torch.int64):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def pieces(lengths):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def layout(lengths, dtype=torch.int64):
    """The layout of packed sequences of these lengths."""
    return Layout(1, sum(lengths), torch.device("cpu"), cu_seqlens=places(lengths, dtype))


@pytest.mark.parametrize("make", [Layout.pad_all, Layout.pad_bucketed])
@settings(max_examples=40)
@given(lengths=LENGTHS)
def test_padded_and_packed_again_is_the_same(make, lengths):
    """Values and gradients; padding is 0 and passes no gradient; every sequence is in its group."""
    time = sum(lengths)
    x = torch.randn(1, time, 2, 3, dtype=torch.float64, requires_grad=True)
    packed = make(layout(lengths))
    padded = packed.unpack(x)
    for sequences, each, part in zip(packed.sequences, packed.layouts, padded, strict=True):
        assert (each.rows, each.time) == part.shape[:2]
        assert (each.zero(torch.ones_like(part))[:, :, 0, 0] != 0).equal(each.real(part))
        for i, row in zip(sequences.tolist(), part, strict=True):
            assert torch.equal(row[: lengths[i]], x[0, pieces(lengths)[i]])
            assert (row[lengths[i] :] == 0).all()
    back = packed.pack([part * 2 + 1 for part in padded])
    assert torch.equal(back, x * 2 + 1)
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], torch.full_like(x, 2))
    mine = [torch.tensor(lengths)[sequences] for sequences in packed.sequences]
    assert packed.in_order(mine).tolist() == lengths
    assert packed.in_order(packed.sequences).tolist() == list(range(len(lengths)))


@given(lengths=LENGTHS)
def test_buckets_waste_no_more_than_there_is(lengths):
    padded = sum(each.rows * each.time for each in layout(lengths).pad_bucketed().layouts)
    assert padded <= 2 * sum(lengths) + SHORT * len(lengths)


@given(rows=st.lists(LENGTHS.map(lambda x: [max(n, 1) for n in x]), min_size=1, max_size=3))
def test_bounds_are_where_numbers_change_and_rows_end(rows):
    """For any numbers, even if one row ends with the number that the next begins with."""
    time = max(map(sum, rows))
    rows = [[*row, time - sum(row)] if sum(row) < time else row for row in rows]
    number = torch.stack([(torch.arange(len(row)) % 2).repeat_interleave(torch.tensor(row)) for row in rows])
    assert sequence_bounds(number).tolist() == places([n for row in rows for n in row]).tolist()


def test_where_tokens_are():
    packed = layout([2, 0, 3], torch.int32)
    sequence, position = packed.locate()
    assert sequence.tolist() == [0, 0, 2, 2, 2]
    assert position.tolist() == [0, 1, 0, 1, 2]
    assert packed.positions().tolist() == [[0, 1, 0, 1, 2]]
    assert packed.after(torch.tensor([5, 7, 9])).positions().tolist() == [[5, 6, 9, 10, 11]]
    mask = torch.tensor([[True, False, True, True], [False, False, True, False]])
    padded = Layout.of("x", torch.zeros(2, 4), mask)
    assert padded.positions().tolist() == [[0, -1, 1, 2], [-1, -1, 0, -1]]
    assert padded.after(torch.tensor([5, 0])).positions().tolist() == [[5, -1, 6, 7], [-1, -1, 0, -1]]
    assert padded.new.tolist() == [3, 1]
    dense = Layout.of("x", torch.zeros(2, 3))
    assert dense.positions().tolist() == [[0, 1, 2]] * 2
    assert (dense.new, dense.n, packed.n, packed.new.tolist()) == (3, 2, 3, [2, 0, 3])


def test_a_layout_of_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"layout is for b=1 and t=5 on cpu, x has shape \[1, 4\] on cpu"):
        Layout.of("x", torch.zeros(1, 4), cu_seqlens=layout([2, 3]))


def test_a_mask_beside_a_layout_is_refused():
    """Just as a mask beside cu_seqlens is: the layout already says where the tokens are."""
    mask = torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="cu_seqlens and mask exclude each other"):
        Layout.of("x", torch.zeros(1, 5), mask, layout([2, 3]))


def alone(arguments, lengths, **options):
    """Each sequence alone, by the definition; results and states are concatenated."""
    found = []
    for i, piece in enumerate(pieces(lengths)):
        one = {name: x[:, piece] for name, x in arguments.items() if name != "state"}
        if "state" in arguments:
            one["state"] = LinearState(*(x[i : i + 1] for x in arguments["state"]))
        y, state = linear_attention(**one, impl="reference", **options)
        found.append((y, *state))
    ys, kvs, zs = zip(*found, strict=True)
    return torch.cat(ys, 1), torch.cat(kvs), torch.cat(zs)


def sequences(lengths, *, state=True, **sizes):
    """Arguments for these sequences in one row."""
    arguments = draw(b=1, t=sum(lengths), state=False, **sizes)
    if state:
        states = draw(b=len(lengths), t=1, **sizes)["state"]
        arguments["state"] = LinearState(*(x.detach().requires_grad_() for x in states))
    return arguments


def gradients(outputs, arguments):
    inputs = flat(arguments)
    found = torch.autograd.grad(uneven(*outputs), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("impl", ["reference", *FAST])
@settings(max_examples=40)
@given(data=st.data())
def test_packed_is_each_sequence_alone(impl, data):
    """Values, states and all gradients, over lengths, modes, decays, states, grouped heads and threads."""
    choose = data.draw
    lengths, g = choose(LENGTHS, label="lengths"), choose(st.integers(1, 3), label="g")
    causal = choose(st.booleans(), label="causal")
    arguments = sequences(
        lengths,
        h=g * choose(st.integers(1, 2), label="h/g"),
        g=g,
        f=choose(st.sampled_from([1, 5, 17]), label="f"),
        e=choose(st.sampled_from([1, 4, 9]), label="e"),
        decay=causal and choose(st.booleans(), label="decay"),
        state=choose(st.booleans(), label="state"),
    )
    options = {
        "causal": causal,
        "normalize": choose(st.booleans(), label="normalize"),
        "feature_map": choose(st.sampled_from(["elu+1", "relu", "exp"]), label="feature_map"),
        "eps": 1e-2,
    }
    cu_seqlens = places(lengths, choose(st.sampled_from([torch.int32, torch.int64]), label="dtype"))
    y, state = linear_attention(**arguments, cu_seqlens=cu_seqlens, impl=impl, **options)
    expected = alone(arguments, lengths, **options)
    assert_close((y, *state), expected, **EXACT)
    assert_close(gradients((y, *state), arguments), gradients(expected, arguments), **EXACT)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("lengths", [[900, 3, 0, 400], [1500], [0, 0], [1] * 20])
def test_threads_share_sequences(threads, lengths):
    """More work than for one thread, for any number of threads: split by sequences and heads, or in time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        arguments = sequences(lengths, h=2, g=1, f=32, e=32)
        y, state = linear_attention(
            **arguments, cu_seqlens=places(lengths), feature_map="elu+1", impl="native"
        )
        found = (y, *state, *gradients((y, *state), arguments))
    finally:
        torch.set_num_threads(before)
    expected = alone(arguments, lengths, feature_map="elu+1")
    for a, e in zip(found, (*expected, *gradients(expected, arguments)), strict=True):
        assert_close(a, e, **EXACT)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_a_broken_sequence_stays_alone(impl):
    lengths = [20, 30, 17]
    arguments = sequences(lengths, decay=False)
    clean, _ = linear_attention(**arguments, cu_seqlens=places(lengths), feature_map="elu+1", impl=impl)
    arguments["v"] = arguments["v"].detach().clone()
    arguments["v"][:, 20:50] = torch.nan
    y, _ = linear_attention(**arguments, cu_seqlens=places(lengths), feature_map="elu+1", impl=impl)
    assert y[:, 20:50].isnan().all()
    for piece in (slice(0, 20), slice(50, 67)):
        assert torch.equal(y[:, piece], clean[:, piece])


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_no_sequences(impl):
    y, state = linear_attention(*torch.zeros(3, 1, 0, 2, 3), cu_seqlens=places([]), impl=impl)
    assert (y.shape, state.kv.shape) == ((1, 0, 2, 3), (0, 2, 3, 3))


def test_bounds_are_the_same_for_all_that_is_mapped():
    q, k, v = torch.randn(3, 2, 1, 9, 2, 3, dtype=torch.float64)

    def call(q, k, v, cu_seqlens):
        return linear_attention(q, k, v, cu_seqlens=cu_seqlens, feature_map="elu+1")[0]

    bounds = places([4, 5])
    expected = torch.stack([call(q[i], k[i], v[i], bounds) for i in range(2)])
    assert_close(torch.vmap(call, (0, 0, 0, None))(q, k, v, bounds), expected, **EXACT)
    with pytest.raises(ValueError, match="cu_seqlens must be the same for all that vmap maps over"):
        torch.vmap(call, (None, None, None, 0))(q[0], k[0], v[0], torch.stack((bounds, places([2, 7]))))


@needs_native
def test_native_is_an_operator_that_pytorch_accepts():
    lengths = [5, 0, 33]
    x = sequences(lengths, h=2, g=1, f=3, e=4)
    others = (x["log_decay"], x["log_input"], *x["state"], None, places(lengths), True, True, 1e-6)
    accepted((x["q"], x["k"], x["v"], *others, "relu", False))


@needs_native
def test_native_never_reads_beyond_the_row():
    """A compiled graph does not check the values; the library does."""
    x = torch.rand(1, 4, 1, 2)
    for wrong in ([1, 4], [0, 5], [0, 3], [0, 3, 2, 4], [0, -1, 4]):
        with pytest.raises(RuntimeError, match="refused the call"):
            kernel.forward(x, x, x, cu_seqlens=torch.tensor(wrong))
    with pytest.raises(RuntimeError, match="refused the call"):
        kernel.forward(x, x[:, :3], x[:, :3], cu_seqlens=torch.tensor([0, 4]), causal=False)


SCRIPT = """
import torch
from lintra.ops import linear_attention
def call(q, k, v, cu_seqlens):
    y, state = linear_attention(q * 1.5, k, v, cu_seqlens=cu_seqlens, feature_map="elu+1", impl={impl!r})
    return y.sin(), state.kv
torch.manual_seed(0)
compiled = torch.compile(call, fullgraph=True, backend={compiler!r})
for lengths in ([5, 0, 28], [33, 1, 7, 0]):
    t = sum(lengths)
    x = [torch.randn(1, t, 4, 8), torch.randn(1, t, 2, 8), torch.randn(1, t, 2, 8)]
    x = [each.requires_grad_() for each in x]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    expected, found = call(*x, cu_seqlens), compiled(*x, cu_seqlens)
    gradients = torch.autograd.grad(expected[0].sum() + expected[1].sum(), x)
    again = torch.autograd.grad(found[0].sum() + found[1].sum(), x)
    for a, b in zip((*found, *again), (*expected, *gradients)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
print("same")
"""


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("impl", COMPILED)
def test_torch_compile_keeps_it_in_one_graph(impl, compiler):
    """fullgraph=True raises at a graph break. In a separate process, since the compiler gives warnings."""
    script = SCRIPT.format(impl=impl, compiler=compiler)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


X = {name: x for name, x in draw(b=1, t=9, state=False).items() if name in "qkv"}
GOOD = torch.tensor([0, 4, 9])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens": [0, 9]}, TypeError, r"cu_seqlens must be a tensor \[n\+1\], got list"),
        ({"cu_seqlens": GOOD.float()}, TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
        ({"cu_seqlens": GOOD[None]}, ValueError, r"must be \[n\+1\] for n sequences, got shape \[1, 3\]"),
        ({"cu_seqlens": GOOD[:0]}, ValueError, r"must be \[n\+1\] for n sequences, got shape \[0\]"),
        ({"cu_seqlens": GOOD.to("meta")}, ValueError, "cu_seqlens must be on the device of q, cpu, got meta"),
        ({"cu_seqlens": torch.tensor([1, 9])}, ValueError, "cu_seqlens must begin with 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, "must end with the number of tokens, t=9, got 8"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 9])}, ValueError, "must not decrease, got 5 before 4"),
        ({"mask": torch.ones(1, 9, dtype=torch.bool)}, ValueError, "cu_seqlens and mask exclude each other"),
        ({n: torch.cat((x, x)) for n, x in X.items()}, ValueError, r"one row: q must be \[1 t \.\.\.\], got"),
        ({"q": X["q"][:, :5], "causal": False}, ValueError, "as many queries as keys, got t=5 and s=9"),
        ({"state": LinearState.empty(1, 2, 5, 3, device=None, dtype=torch.float64)}, ValueError,
         r"state.kv must be \[b=2 g=2 d=5 e=3\], got shape \[1, 2, 5, 3\]"),
    ],
)  # fmt: skip
def test_refuses(changes, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**{**X, "cu_seqlens": GOOD, **changes})


def test_inference_and_training_share_no_tensors_of_a_layout():
    layout = Layout(1, 5, torch.device("cpu"), cu_seqlens=torch.tensor([0, 2, 5]))
    with torch.inference_mode():
        assert layout.positions() is layout.positions()
        assert layout.rope(100.0) is layout.rope(100.0)
        assert layout.positions().is_inference()
    assert not layout.positions().is_inference()
    assert layout.positions() is layout.positions()


def test_a_layout_keeps_no_tensors_of_a_transform():
    """Those of torch.func end with it."""
    q = torch.randn(1, 9, 1, 4)
    layout = Layout.of("q", q, cu_seqlens=places([4, 5]))

    def call(q):
        return linear_attention(q, q.exp(), q, cu_seqlens=layout, impl="torch")[0].sum()

    expected = call(q)
    fresh = Layout.of("q", q, cu_seqlens=places([4, 5]))
    layout = fresh
    torch.func.grad(call)(q)
    for made in (fresh.pad_bucketed(), fresh.pad_all()):
        assert not torch._C._functorch.is_functorch_wrapped_tensor(made.place)
    assert_close(call(q), expected)


def test_decays_of_padding_are_not_checked_in_a_layout_either():
    q, mask = torch.randn(1, 2, 1, 4), torch.tensor([[True, False]])
    decay = torch.tensor([[[-0.1], [math.nan]]])
    y = linear_attention(q, q.exp(), q, log_decay=decay, cu_seqlens=Layout.of("q", q, mask))[0]
    assert_close(y, linear_attention(q, q.exp(), q, log_decay=decay, mask=mask)[0])


_RATES = -torch.ones(2, 4)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("v", lambda q, x, of: linear_attention(q, q, x, **of)),
        ("log_decay", lambda q, x, of: linear_attention(q, q, q, log_decay=x[..., 0], normalize=False, **of)),
        ("v", lambda q, x, of: linear_attention(q, q, x, beta=q[..., 0], normalize=False, **of)),
        ("beta", lambda q, x, of: linear_attention(q, q, q, beta=x[..., 0], normalize=False, **of)),
        ("dt", lambda q, x, of: selective_scan(q[..., 0], x[..., 0], _RATES, q[:, :, :1], q[:, :, :1], **of)),
        ("C", lambda q, x, of: selective_scan(q[..., 0], q[..., 0], _RATES, q[:, :, :1], x[:, :, :1], **of)),
        (
            "A",
            lambda q, x, of: selective_scan(
                q[..., 0], q[..., 0], _RATES[:, :2], q[:, :, :1], q[:, :, :1], **of
            ),
        ),
        ("bias", lambda q, x, of: causal_conv1d(q[..., 0], _RATES, _RATES[0, :1], **of)),
    ],
)
def test_what_a_layout_leaves_unchecked_reaches_no_memory(name, call):
    """A layout stands for arguments that have been checked; kernels check the shapes that they read."""
    q, longer = torch.rand(1, 16, 2, 4), torch.rand(1, 24, 2, 4)
    with pytest.raises(ValueError, match=f"{name} must be "):
        call(q, longer, {"layout": Layout.of("q", q), "impl": "native"})

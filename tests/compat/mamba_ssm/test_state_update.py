"""One token with a state that is updated in place, for Mamba and Mamba-2."""

import pytest
import torch
from torch.testing import assert_close

from lintra import native
from lintra.compat.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from lintra.testing.laws import gradients, raises
from tests.compat.mamba_ssm import loops

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # for float64
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # for float32, for one token
NAMES = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")


def draw(heads=4, tied=False, b=3, p=9, g=2, n=7, dtype=torch.float64):
    """Arguments by name; Mamba's have no heads. `tied`: one number per head, expanded."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    shape = (heads, p) if heads else (p,)
    groups = (g,) if heads else ()
    given = [randn(b, *shape, n), randn(b, *shape), randn(b, *shape), -randn(*shape, n).exp()]
    given += [randn(b, *groups, n), randn(b, *groups, n), randn(*shape), randn(b, *shape), randn(*shape)]
    if tied:
        given[2] = given[2][..., :1].expand(given[2].shape)
        given[3] = given[3][..., :1, :1].expand(given[3].shape)
        given[8] = given[8][..., :1].expand(given[8].shape)
    return dict(zip(NAMES, given, strict=True))


def by_loop(state, x, dt, A, B, C, D, z, dt_bias):
    """y and the state after one token, from the loop of Mamba over concatenated heads."""
    if state.dim() == 3:
        state, x, dt, B, C, z = (y[:, None] for y in (state, x, dt, B, C, z))
        A, D, dt_bias = A[None], D[None], dt_bias[None]
    dt = loops.step_sizes(dt, dt_bias, True, None)
    B, C = (y.repeat_interleave(x.shape[1] // y.shape[1], 1)[:, :, None] for y in (B, C))
    after = (dt[..., None] * A).exp() * state + (dt * x)[..., None] * B
    y = ((after * C).sum(-1) + D * x) * torch.nn.functional.silu(z)
    return y, after


forms = pytest.mark.parametrize(
    "form",
    [{"heads": 0}, {"heads": 4}, {"heads": 4, "tied": True}, {"heads": 2, "g": 1, "n": 16, "tied": True}],
    ids=str,
)


def update(given, **options):
    return selective_state_update(**given, dt_softplus=True, **options)


@pytest.mark.parametrize("name", [None, *native.instruction_sets()])
@forms
def test_equals_the_loop_in_place(form, name):
    given = draw(**form)
    y, after = by_loop(**given)
    state = given["state"]
    place = state.data_ptr()
    if name is None:  # a gradient is requested, so that the kernels alone cannot serve
        given["x"].requires_grad_()
        found = update(given)
    else:
        with native.use(name):
            found = update(given)
    assert_close(found, y.view(found.shape), **EXACT)
    assert_close(state, after.view(state.shape), **EXACT)
    assert state.data_ptr() == place


@forms
def test_gradients(form):
    given = draw(**form)
    inputs = [x.requires_grad_() for name, x in given.items() if name != "state"]
    before = given["state"].clone()
    y = update(given)
    expected = by_loop(**{**given, "state": before})[0].view(y.shape)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@pytest.mark.parametrize("pool", [False, True])
@forms
def test_gradients_of_steps_reach_earlier_tokens(form, pool):
    """Through the state, which each step overwrites."""
    steps = [draw(**form) for _ in range(3)]
    for i, step in enumerate(steps):
        for name in ("x", "dt", "B", "C", "z"):
            step[name] = (step[name] + i).requires_grad_()
    weights = {name: steps[0][name].requires_grad_() for name in ("A", "D", "dt_bias")}
    steps = [step | weights for step in steps]
    first = steps[0]["state"].requires_grad_()
    inputs = [
        first,
        *weights.values(),
        *(step[name] for step in steps for name in ("x", "dt", "B", "C", "z")),
    ]

    state, expected = first, []
    for step in steps:
        y, state = by_loop(**{**step, "state": state})
        expected.append(y.view(step["x"].shape))
        state = state.view(first.shape)
    options = {}
    held, found = first.clone(), []
    if pool:
        options["state_batch_indices"] = torch.tensor([4, 0, 2])
        held = torch.zeros(5, *first.shape[1:], dtype=first.dtype).index_copy(
            0, torch.tensor([4, 0, 2]), first
        )
    place = held.data_ptr()
    for step in steps:
        found.append(update({**step, "state": held}, **options))
    assert held.data_ptr() == place
    last = held[[4, 0, 2]] if pool else held
    found, expected = torch.stack(found), torch.stack(expected)
    assert_close([found, last], [expected, state], **EXACT)
    assert_close(gradients(found, inputs), gradients(expected, inputs), **EXACT)
    assert_close(gradients(last, inputs), gradients(state, inputs), **EXACT)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's, for a state with a graph
def test_gradients_reach_earlier_tokens_in_a_compiled_step():
    x = torch.ones(3, 1, 2, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 4, dtype=torch.float64)
    state, ys = torch.zeros(1, 2, 4, dtype=torch.float64), []
    torch.compiler.reset()
    step = torch.compile(selective_state_update, backend="aot_eager")
    for token in x:
        ys.append(step(state, token, torch.ones_like(token), -one.expand(2, 4), one, one))
    torch.stack(ys).sum().backward()
    decay = torch.tensor(-1.0, dtype=torch.float64).exp()
    expected = 4 * torch.stack((1 + decay + decay**2, 1 + decay, torch.ones_like(decay)))
    assert_close(x.grad, expected[:, None, None].expand(3, 1, 2), **EXACT)


def test_a_leaf_that_requires_grad_is_not_written_over():
    given = draw()
    given["state"].requires_grad_()
    raises(ValueError, "state is written to.*clone", update, given)
    with torch.no_grad():
        update(given)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_equals_the_fallback(fallback_module, name):
    module = fallback_module(name)
    function = getattr(module, f"{name}_selective_state_update").__wrapped__
    given = draw(4 if name == "mamba2" else 0, name == "mamba2", dtype=torch.float32)
    theirs = {"hidden_states" if key == "x" else key: x.clone() for key, x in given.items()}
    expected = function(**theirs, dt_softplus=True)
    assert_close(update(given), expected, **CLOSE)
    assert_close(given["state"], theirs["state"], **CLOSE)


@forms
def test_rows_of_a_pool(form):
    given = draw(**form)
    indices = torch.tensor([4, -1, 0], dtype=torch.int32)
    pool = torch.randn(6, *given["state"].shape[1:], dtype=torch.float64)
    given["state"] = pool[indices.clamp(min=0).long()]
    y, after = by_loop(**given)
    expected = pool.clone()
    expected[[4, 0]] = after[[0, 2]].view(2, *pool.shape[1:])
    given["state"] = pool
    found = update(given, state_batch_indices=indices)
    y = y.view(found.shape).clone()
    y[1] = 0
    assert_close(found, y, **EXACT)
    assert_close(pool, expected, **EXACT)


@forms
def test_any_strides(form):
    given = draw(**form)
    expected = {name: x.clone() for name, x in given.items()}
    y = update(expected)
    views = dict(given, state=given["state"].mT.contiguous().mT)
    assert_close(update(views), y, **EXACT)
    assert_close(views["state"], expected["state"], **EXACT)


def test_the_stride_of_a_single_row_is_nobodys_business():
    """As a matrix product leaves it: with a second row, its rows would overlap."""
    given = draw(tied=True, b=1)
    expected = {name: x.clone() for name, x in given.items()}
    y = update(expected)
    given["state"] = given["state"].as_strided((1, 4, 9, 7), (63, 63, 7, 1))
    place = given["state"].data_ptr()
    assert_close(update(given), y, **EXACT)
    assert_close(given["state"], expected["state"], **EXACT)
    assert given["state"].data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, None])
@forms
def test_half_precision(form, kept, dtype):
    """States in float32 stay in float32; those in half precision are rounded once per token."""
    given = draw(**form, dtype=torch.float32)
    halves = {name: x if name in ("A", "D", "dt_bias") else x.to(dtype) for name, x in given.items()}
    if form.get("tied"):
        halves["dt"] = halves["dt"][..., :1].expand(halves["dt"].shape)
    if kept is not None:
        halves["state"] = halves["state"].to(kept)
    y, after = by_loop(**{name: x.double() for name, x in halves.items()})
    found = update(halves)
    assert found.dtype == dtype
    half = torch.finfo(dtype).eps
    assert_close(found.double(), y.view(found.shape), rtol=half, atol=1e-5)
    state = halves["state"]
    assert_close(state.double(), after.view(state.shape), rtol=half if kept is None else 1e-5, atol=1e-5)


def test_a_caller_may_be_compiled():
    given = draw(tied=True, dtype=torch.float32)
    expected = {name: x.clone() for name, x in given.items()}
    torch.compiler.reset()
    y = torch.compile(update, backend="aot_eager")(given)
    assert_close(y, update(expected), **CLOSE)
    assert_close(given["state"], expected["state"], **CLOSE)


def test_refusals():
    given = draw()
    with pytest.raises(TypeError, match="unexpected keyword"):
        selective_state_update(**given, cache_indices=None)
    raises(
        NotImplementedError, "not supported.*real", update, {**given, "A": given["A"].to(torch.complex128)}
    )
    for name in NAMES[1:]:
        raises(
            ValueError, f"{name} must be|{name} must have", update, {**given, name: given[name][:1, ..., :3]}
        )
    raises(
        ValueError,
        "groups of B",
        update,
        {**given, "B": given["B"][:, :1].expand(3, 3, 7), "C": given["B"][:, :1].expand(3, 3, 7)},
    )
    raises(TypeError, "state_batch_indices", update, given, state_batch_indices=torch.zeros(3))
    raises(ValueError, "state_batch_indices", update, given, state_batch_indices=torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("name", [None, *native.instruction_sets()])
def test_what_a_graph_kept_of_the_state_is_refused(name):
    given = draw(dtype=torch.float32)
    kept = torch.ones_like(given["state"]).requires_grad_()
    loss = (kept * given["state"]).sum()
    if name is None:
        selective_state_update(**{**given, "x": given["x"].requires_grad_()}, dt_softplus=True)
    else:
        with native.use(name):
            selective_state_update(**given, dt_softplus=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_group_may_be_left_out():
    given = draw(heads=4, g=1)
    flat = given | {name: given[name][:, 0] for name in ("B", "C")} | {"state": given["state"].clone()}
    assert_close(update(flat), update(given), rtol=0, atol=0)
    assert_close(flat["state"], given["state"], rtol=0, atol=0)

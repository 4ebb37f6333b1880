"""Longformer: its dense definition, windows and global tokens as sets, the state, what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import longformer, softmax
from lintra.attention.longformer import LongformerAttention
from lintra.models import decoder
from lintra.nn import AttentionLayer
from lintra.ops.padding import expand_mask
from lintra.ops.rope import RotaryEmbedding
from lintra.testing import laws
from lintra.testing.laws import EXACT, Case, extend_by_steps, gradients, same_states

VARIANTS = [
    longformer.Config(window=3),
    longformer.Config(window=2, dilation=2, global_tokens=3),
    longformer.Config(window=0, global_tokens=2, global_projections=True, scale=0.3),
]
PER_HEAD = longformer.Config(window=2, dilation=(1, 3, 2, 1), global_tokens=2)
ANY = longformer.Config(window=4, dilation=2, global_projections=True)


def dense(attention: LongformerAttention, *given: Tensor, global_mask: Tensor | None = None) -> Tensor:
    """Every score, by the sets of the module's docstring: one softmax for each query."""
    config, time = attention.config, given[0].shape[1]
    local = given[:3]
    wide = [x.unflatten(2, (-1, y.shape[3])) for x, y in zip(given[3:], local, strict=False)] or local
    first = (torch.arange(time) < config.global_tokens).expand(len(local[0]), time)
    ys = []
    for b, chosen in enumerate((first if global_mask is None else global_mask).tolist()):
        seen = torch.zeros(attention.heads, time, time, dtype=torch.bool)
        for h in range(attention.heads):
            dilation = config.dilations[h % len(config.dilations)]
            for i in range(time):
                for j in range(i + 1 if attention.causal else time):
                    inside = abs(i - j) <= config.window * dilation and (i - j) % dilation == 0
                    seen[h, i, j] = inside or chosen[i] or chosen[j]
        of_all, y = (_softmax(attention, *(x[b] for x in each), seen).movedim(0, 1) for each in (wide, local))
        ys.append(torch.where(torch.tensor(chosen)[:, None, None], of_all, y))
    return torch.stack(ys) if ys else local[2].new_zeros(0, time, attention.heads, attention.value_dim)


def _softmax(attention: LongformerAttention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    group = attention.heads // attention.kv_heads
    scale = q.shape[-1] ** -0.5 if attention.config.scale is None else attention.config.scale
    scores = scale * torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights @ v.repeat_interleave(group, 1).movedim(0, 1)


def named(inputs: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("global_q", "global_k", "global_v"), inputs[3:], strict=False))


def some_globals(time: int = laws.TIME) -> Tensor:
    """A different number of them in each sample: neighbours, and the first and the last token."""
    chosen = torch.zeros(2, time, dtype=torch.bool)
    chosen[0, [0, 7, 8, time - 1]] = True
    chosen[1, time // 2] = True
    return chosen


modes = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])


@modes
@pytest.mark.parametrize(
    "law",
    [
        laws.parallel_is_recurrent,
        laws.padding_is_absence,
        laws.padding_leaves_the_state,
        laws.padding_changes_nothing,
        laws.grouped_heads_are_repeated_heads,
        laws.equals_its_definition,
        laws.sixteen_bits_lose_no_more_than_the_textbook,
    ],
    ids=lambda law: law.__name__,
)
def test_a_dilation_for_each_head(law, causal):
    case = Case("longformer", PER_HEAD, causal)
    if laws.APPLIES.get(law, laws.always)(case):
        law(case, dense) if law in laws.WITH_DEFINITION else law(case)


@modes
@pytest.mark.parametrize("window", [18, 100])
def test_a_window_over_everything_is_softmax(window, causal):
    inputs = Case("softmax", softmax.Config(), causal).draw()
    y = Case("longformer", longformer.Config(window=window), causal).build()(*inputs)
    expected = Case("softmax", softmax.Config(), causal).build()(*inputs)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@modes
def test_all_tokens_global_is_softmax_of_the_global_projections(causal):
    case = Case("longformer", ANY, causal)
    inputs = case.draw()
    y = case.build()(*inputs[:3], **named(inputs), global_mask=torch.ones(2, laws.TIME, dtype=torch.bool))
    wide = [x.unflatten(2, (-1, y.shape[3])) for x, y in zip(inputs[3:], inputs[:3], strict=True)]
    expected = Case("softmax", softmax.Config(), causal).build()(*wide)
    assert_close(y, expected, **EXACT)
    assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@modes
@pytest.mark.parametrize("window", [0, 1, 3, 8])
@pytest.mark.parametrize("dilation", [1, 3])
def test_any_tokens_may_be_global(window, dilation, causal):
    """A different number of them in each sample, at every length up to several blocks."""
    config = longformer.Config(window=window, dilation=dilation, global_projections=True)
    case = Case("longformer", config, causal)
    attention = case.build()
    for time in (1, 2, 4 * window + 3, 90):
        inputs = case.draw(time)
        generator = torch.Generator().manual_seed(time)
        chosen = torch.rand(2, time, generator=generator) < torch.tensor([[0.3], [0.05]])
        y = attention(*inputs[:3], **named(inputs), global_mask=chosen)
        expected = dense(attention, *inputs, global_mask=chosen)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, inputs), gradients(expected, inputs), **EXACT)


@modes
@pytest.mark.parametrize("time", [0, 1, 5])
def test_global_tokens_under_autocast(time, causal):
    """Few tokens or none: the output has autocast's dtype."""
    case = Case("longformer", longformer.Config(window=2, global_tokens=2), causal)
    q, k, v, *wide = (x.detach().bfloat16() for x in case.draw(time))
    with torch.autocast("cpu", torch.bfloat16):
        y = case.build().float()(q, k, v, **named([q, k, v, *wide]))
    assert (y.dtype, y.shape) == (torch.bfloat16, (2, time, 4, laws.VALUE_DIM))


@modes
def test_padding_wins_over_global(causal):
    """A global_mask may be True at padded places; the result is that of the real tokens alone."""
    case = Case("longformer", ANY, causal)
    attention, inputs, chosen = case.build(), case.draw(), some_globals()
    for mask in laws.some_masks():
        dirty = [x.masked_fill(~expand_mask(mask, x), torch.nan) for x in inputs]
        y = attention(*dirty[:3], **named(dirty), mask=mask, global_mask=chosen)
        assert (y[~mask] == 0).all()
        for i in range(2):
            alone = [x[i : i + 1, mask[i]] for x in inputs]
            expected = dense(attention, *alone, global_mask=chosen[i : i + 1, mask[i]])
            assert_close(y[i, mask[i]], expected[0], **EXACT)
        for g in gradients(y, inputs):
            assert g.isfinite().all()
            assert (g[~mask] == 0).all()


def test_global_tokens_after_a_state():
    """A global token far from the start reads all that came before it: forward, pieces and steps agree."""
    case = Case("longformer", ANY, True)
    attention, inputs, chosen = case.build(), case.draw(), some_globals()
    y = attention(*inputs[:3], **named(inputs), global_mask=chosen)
    expected, states = gradients(y, inputs), []
    for cuts in ((5, 1, 9, 4), (1,) * laws.TIME):
        for stepped in (False, True):
            state, ys, first = attention.start(2, dtype=torch.float64), [], 0
            for size in cuts:
                part = [x[:, first : first + size] for x in inputs]
                given = named(part) | {"global_mask": chosen[:, first : first + size]}
                if stepped:  # its loop slices the extra inputs, and so the mask
                    piece, state = extend_by_steps(attention, *part[:3], state, **given)
                else:
                    piece, state = attention.extend(*part[:3], state, **given)
                ys.append(piece)
                first += size
            assert_close(torch.cat(ys, 1), y, **EXACT)
            assert_close(gradients(torch.cat(ys, 1), inputs), expected, **EXACT)
            states.append(state)
    for state in states[1:]:
        same_states(state, states[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler
@pytest.mark.parametrize(("limit", "causal"), [(None, True), (7, True), (7, False)])
def test_a_global_mask_in_one_graph_and_in_a_transform(limit, causal):
    """The number of global tokens cannot be read there: it may be all, or what the configuration says."""
    case = Case("longformer", replace(ANY, global_limit=limit), causal)
    attention, inputs, chosen = case.build(), case.draw(), some_globals()
    y = attention(*inputs[:3], **named(inputs), global_mask=chosen)

    def call(chosen, *inputs):
        return attention(*inputs[:3], **named(inputs), global_mask=chosen)

    found = torch.compile(call, backend="eager", fullgraph=True)(chosen, *inputs)
    assert_close(found, y, **EXACT)
    assert_close(gradients(found, inputs), gradients(y, inputs), **EXACT)

    def alone(chosen, *inputs):
        return call(chosen[None], *(x[None] for x in inputs))[0]

    assert_close(torch.vmap(alone)(chosen, *inputs), y, **EXACT)
    if causal:
        with torch.no_grad():
            check_a_token_in_one_graph(attention, inputs)


def check_a_token_in_one_graph(attention: LongformerAttention, inputs: list[Tensor]) -> None:
    """One token after a state, and another one after that."""
    token = [x[:, :1] for x in inputs]
    _, state = attention.extend(*inputs[:3], attention.start(2, dtype=torch.float64), **named(inputs))
    given = {**named(token), "global_mask": torch.tensor([[True], [False]])}
    compiled = torch.compile(attention.extend, backend="eager", fullgraph=True)
    right, found = (extend(*token[:3], state, **given) for extend in (attention.extend, compiled))
    assert_close(found[0], right[0], **EXACT)
    again = [attention.extend(*token[:3], after, **given)[0] for _, after in (right, found)]
    assert_close(*again, **EXACT)


def test_a_layer_of_tensors_without_data():
    layer = AttentionLayer(16, longformer.Config(window=2, global_projections=True), heads=4)
    x, chosen = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer.extend(mode.from_tensor(x))[0].shape == x.shape
        assert layer(mode.from_tensor(x), global_mask=chosen).shape == x.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler
def test_more_global_tokens_than_the_limit_are_refused():
    case = Case("longformer", replace(ANY, global_limit=2), False)
    attention, inputs, chosen = case.build(), case.draw(), torch.arange(laws.TIME).expand(2, -1) > 11
    with pytest.raises(ValueError, match=r"global_limit=2 tokens of a sample may be global, and .* number 7"):
        attention(*inputs[:3], **named(inputs), global_mask=chosen)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)  # where they cannot be counted
    y = compiled(*inputs[:3], **named(inputs), global_mask=chosen)
    first = chosen & (torch.arange(laws.TIME) < 14)
    assert_close(y, attention(*inputs[:3], **named(inputs), global_mask=first), **EXACT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of the compiler
def test_the_limit_counts_global_tokens_of_earlier_calls():
    """Counted per sample, however it is cut: a third is refused where counting is free, else not global."""
    case = Case("longformer", replace(ANY, global_limit=2), True)
    attention, inputs = case.build(), case.draw()
    chosen = torch.zeros(2, laws.TIME, dtype=torch.bool)
    chosen[0, [1, 6, 12]] = chosen[1, 8] = True
    within = chosen.clone()
    within[0, 12] = False
    y = attention(*inputs[:3], **named(inputs), global_mask=within)
    compiled = torch.compile(attention.extend, backend="eager", fullgraph=True)
    state, ys = attention.start(2, dtype=torch.float64), []
    for first in (0, 5, 10, 15):
        part, some = [x[:, first : first + 5].detach() for x in inputs], chosen[:, first : first + 5]
        given, extend = named(part) | {"global_mask": some}, attention.extend
        if first == 10:
            late = [x[:, 2:3] for x in part]
            marked = named(late) | {"global_mask": some[:, 2:3]}
            with pytest.raises(ValueError, match=r"global_limit=2 .* number 3"):
                attention.extend(*part[:3], state, **given)
            with pytest.raises(ValueError, match=r"global_limit=2 .* number 3"):
                attention.step(*late[:3], state, **marked)
            extend = compiled
        piece, state = extend(*part[:3], state, **given)
        ys.append(piece)
    assert_close(torch.cat(ys, 1), y, **EXACT)


def test_a_limit_that_limits_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"global_limit needs global_projections=True or global_tokens: .* got 2"
    ):
        longformer.Config(global_limit=2)
    longformer.Config(global_limit=2, global_tokens=1)  # a mask may choose others


def test_the_state_is_a_window_and_the_global_tokens():
    attention = Case("longformer", VARIANTS[1], True).build()
    inputs = Case("longformer", VARIANTS[1], True).draw(60)
    _, state = attention.extend(*inputs[:3], attention.start(2, dtype=torch.float64), **named(inputs))
    assert [part.k.shape[1] for part in state[:3]] == [2 * 2, 3, 3]
    assert attention.can.state == "window"
    assert Case("longformer", ANY, True).build().can.state == "grows"


def test_no_globals_in_a_sample_or_in_all():
    case = Case("longformer", ANY, False)
    attention, inputs = case.build(), case.draw()
    nobody = torch.zeros(2, laws.TIME, dtype=torch.bool)
    y = attention(*inputs[:3], **named(inputs), global_mask=nobody)
    assert_close(y, dense(attention, *inputs, global_mask=nobody), **EXACT)
    # The global projections have a gradient, of 0, so that no parameter counts as unused.
    found = torch.autograd.grad(y.sum(), inputs[3:])
    assert all((g == 0).all() for g in found)


@modes
def test_what_lies_outside_of_the_window_changes_nothing(causal):
    case = Case("longformer", VARIANTS[1], causal)
    attention, inputs = case.build(), case.draw()
    y = attention(*inputs[:3], **named(inputs))
    far = [x.clone() for x in inputs]
    for x in far:
        x[:, 8] = 5.0
    z = attention(*far[:3], **named(far))
    near = {8} | ({10, 12} if causal else {4, 6, 10, 12})
    for i in range(3, laws.TIME):
        assert torch.equal(y[:, i], z[:, i]) == (i not in near)


@modes
def test_it_depends_on_the_order_of_the_keys(causal):
    case = Case("longformer", VARIANTS[0], causal)
    attention, (q, k, v) = case.build(), case.draw()
    order = torch.randperm(laws.TIME, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(attention(q, k[:, order], v[:, order]), attention(q, k, v))


@modes
@pytest.mark.parametrize("config", [*VARIANTS, PER_HEAD], ids=str)
def test_constant_values_come_back(config, causal):
    case = Case("longformer", config, causal)
    inputs = [torch.full_like(x, 3.0) if i in (2, 5) else x for i, x in enumerate(case.draw())]
    y = case.build()(*inputs[:3], **named(inputs))
    assert_close(y, torch.full_like(y, 3.0), **EXACT)


@modes
def test_rotation_turns_both_kinds_of_queries_and_keys(causal):
    case = Case("longformer", VARIANTS[1], causal)
    attention, inputs = case.build(), case.draw()
    rope = RotaryEmbedding(torch.arange(laws.TIME).repeat(2, 1), 100.0)
    y = attention(*inputs[:3], **named(inputs), rope=rope)
    rotated = [
        x if i in (2, 5) else rope(x.unflatten(2, (-1, laws.DIM)) if x.dim() == 3 else x)
        for i, x in enumerate(inputs)
    ]
    rotated[3:] = [x.flatten(2) if x.dim() == 4 else x for x in rotated[3:]]
    assert_close(y, attention(*rotated[:3], **named(rotated)), **EXACT)


@modes
def test_adversarial(causal):
    """Equal keys, rows of zeros, large norms, one valid key, one token."""
    case = Case("longformer", VARIANTS[1], causal)
    attention = case.build()
    for change in (torch.zeros_like, torch.ones_like, lambda x: 1e3 * x):
        inputs = [change(x.detach()).requires_grad_() for x in case.draw()]
        y, expected = attention(*inputs[:3], **named(inputs)), dense(attention, *inputs)
        assert_close(y, expected, **EXACT)
        assert_close(gradients(y, inputs), gradients(expected, inputs), rtol=1e-9, atol=1e-8)  # of size 1e3
    inputs = case.draw()
    for place in (0, 9, laws.TIME - 1):
        mask = torch.zeros(2, laws.TIME, dtype=torch.bool)
        mask[:, place] = True
        y = attention(*inputs[:3], **named(inputs), mask=mask)
        # The only token is a global one.
        values = inputs[5].unflatten(2, (2, -1)).repeat_interleave(2, 2)
        assert_close(y[:, place], values[:, place], **EXACT)


def test_defect_10_a_global_token_in_the_window_counts_once():
    """Token 0 is global and in the window of token 1: two keys, equal weights, half of each value."""
    config = longformer.Config(window=1, global_tokens=1)
    attention = config.build(heads=1, dim=2, causal=True)
    x = torch.zeros(1, 2, 1, 2)
    v = torch.tensor([[[[4.0, 0.0]], [[0.0, 4.0]]]])
    y = attention(x, x, v, global_q=x[:, :, 0], global_k=x[:, :, 0], global_v=v[:, :, 0])
    assert_close(y[0, 1, 0], torch.tensor([2.0, 2.0]))


def test_defect_16_scores_below_any_mask_constant():
    """Real keys have a score of -1e5, padding one of 0: all the weight goes to the real keys."""
    attention = longformer.Config(window=1, scale=1.0).build(heads=1, dim=1, causal=False)
    q, k = torch.full((1, 8, 1, 1), 1.0), torch.full((1, 8, 1, 1), -1e5)
    v = torch.arange(8.0).reshape(1, 8, 1, 1).requires_grad_()
    mask = torch.tensor([[True, False, False, True, False, False, True, False]])
    k = k.masked_fill(~mask[..., None, None], 0.0)
    y = attention(q, k, v, mask=mask)
    assert_close(y.flatten(), torch.tensor([1.5, 0.0, 0.0, 3.0, 0.0, 0.0, 4.5, 0.0]))
    assert gradients(y, [v])[0].isfinite().all()


@modes
def test_defect_19_the_window_counts_one_side(causal):
    """With w = 2, a token sees 2 tokens on each side (2 before it when causal) and itself."""
    attention = longformer.Config(window=2).build(heads=1, dim=9, causal=causal)
    x = torch.zeros(1, 9, 1, 9)
    seen = attention(x, x, torch.eye(9).reshape(1, 9, 1, 9))[0, 4, 0]
    assert seen.nonzero().flatten().tolist() == ([2, 3, 4] if causal else [2, 3, 4, 5, 6])


def test_global_projections_begin_as_the_local_ones():
    """A layer whose tokens are all global is then softmax with the same projections."""
    torch.manual_seed(0)
    heads = AttentionLayer(16, ANY, heads=4, kv_heads=2)
    plain = AttentionLayer(16, softmax.Config(), heads=4, kv_heads=2)
    plain.load_state_dict({k: v for k, v in heads.state_dict().items() if "extra" not in k})
    x = torch.randn(2, 11, 16)
    everyone = torch.ones(2, 11, dtype=torch.bool)
    assert_close(heads(x, global_mask=everyone), plain(x))
    with torch.no_grad():
        heads.extra_proj["global_v"].weight.zero_()
    assert not torch.allclose(heads(x, global_mask=everyone), plain(x))


def test_a_checkpoint_keeps_a_dilation_for_each_head(tmp_path):
    model = decoder.Config(vocabulary=5, attention=PER_HEAD, layers=1, heads=4, width=16).build()
    checkpoint.save(model, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model")
    assert loaded.config.attention == PER_HEAD
    tokens = torch.arange(12).reshape(2, 6) % 5
    assert torch.equal(loaded(tokens), model.eval()(tokens))


def test_dropout_acts_in_training_only():
    case = Case("longformer", longformer.Config(window=3, global_tokens=2, dropout=0.5), True)
    attention, inputs = case.build(), case.draw()
    assert not torch.equal(attention(*inputs[:3], **named(inputs)), attention(*inputs[:3], **named(inputs)))
    whole = dense(attention, *inputs)
    assert_close(attention.eval()(*inputs[:3], **named(inputs)), whole, **EXACT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", -1),
        ("dilation", 0),
        ("dilation", (2, 0)),
        ("dilation", ()),
        ("global_tokens", -1),
        ("dropout", 1.0),
        ("scale", float("inf")),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*got"):
        longformer.Config(**{field: value})


def test_config_refuses_types():
    with pytest.raises(TypeError, match="dilation must be int or several, got "):
        longformer.Config(dilation=(1, 2.5))


def test_refuses():
    with pytest.raises(ValueError, match=r"one for each of 4 heads, got \(1, 2\)"):
        longformer.Config(dilation=(1, 2)).build(heads=4, dim=2, causal=True)
    attention = Case("longformer", VARIANTS[0], False).build()
    q, k, v = Case("longformer", VARIANTS[0], False).draw()
    with pytest.raises(ValueError, match="'longformer' has no cross form"):
        attention.encode_memory(k, v)
    with pytest.raises(ValueError, match="global_mask needs global_projections=True"):
        attention(q, k, v, global_mask=some_globals())
    case = Case("longformer", VARIANTS[1], True)
    attention, inputs = case.build(), case.draw()
    with pytest.raises(TypeError, match=r"'longformer' takes global_q \[b t \d+\], got None"):
        attention(*inputs[:3])
    with pytest.raises(TypeError, match=r"'longformer' takes no gate with .*Config"):
        attention(*inputs[:3], **named(inputs), gate=inputs[0])
    with pytest.raises(ValueError, match="global_k must be"):
        attention(*inputs[:3], **named(inputs) | {"global_k": inputs[3]})
    with pytest.raises(ValueError, match="after a state, a global_mask needs global_projections=True"):
        attention.extend(*inputs[:3], attention.start(2), **named(inputs), global_mask=some_globals())
    with pytest.raises(TypeError, match="global_mask must be boolean"):
        attention(*inputs[:3], **named(inputs), global_mask=some_globals().long())
    with pytest.raises(ValueError, match="global_mask must be"):
        attention(*inputs[:3], **named(inputs), global_mask=some_globals()[:, 1:])
    with pytest.raises(TypeError, match="state must be a LongformerState, got tuple"):
        attention.extend(*inputs[:3], (), **named(inputs))

"""The runtime compared with PyTorch: the same params, the same probabilities, the same tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra import checkpoint, native, runtime
from lintra.attention import linear
from lintra.attention.softmax import SoftmaxAttention
from lintra.cli.info import info
from lintra.export import runtime as export
from lintra.generation import sampling
from lintra.generation.inputs import prepare_inputs
from lintra.generation.options import Sampler
from lintra.models import decoder
from lintra.native.quantize import round_rows
from lintra.nn import LogisticMixture
from lintra.runtime import Error, Model, Sequence
from tests.kinds import LENGTH, build
from tests.runtime.kinds import KINDS

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

# Relative to the largest number. float32: the same sums in another order, gelu within 1.2e-7. float16 rounds
# a weight by up to 2^-11 of itself, int8 by up to 2^-8 of the largest in its row. These errors hardly
# average out over the few inputs here, and add up over layers; weights of both signs cancel (identity).
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "int8": 1.5e-1}


def tokens_of(model, count=LENGTH - 2, seed=1):
    """Random tokens, after the start symbol if there is one."""
    drawn = torch.randint(0, model.config.vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    if model.start_token is not None:
        drawn[0] = model.start_token
    return drawn.tolist()


@torch.no_grad()
def right_params(model, tokens):
    return model(torch.tensor([tokens]))[0]


def stepped(sequence, tokens):
    """The params after each token."""
    params = []
    for token in tokens:
        sequence.step(token)
        params.append(sequence.params())
    return torch.stack(params)


def loaded(model, weights="float32"):
    return Model(export.to_bytes(model, weights))


def close(mine, right, tolerance):
    assert mine.shape == right.shape
    assert (mine - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_a_step(kind, weights, instruction_set):
    model = build(**KINDS[kind])
    tokens = tokens_of(model)
    close(stepped(Sequence(loaded(model, weights)), tokens), right_params(model, tokens), TOLERANCE[weights])


def test_features_that_may_be_0_are_turned_where_a_model_says_so():
    config = linear.Config(feature_map=linear.SquaredRelu(), rotary="unbounded", eps=1e-2)
    with pytest.warns(UserWarning, match="may be 0 where"):
        model = build(position="rotary", heads=2, width=24, attention=config)
    tokens = tokens_of(model)
    close(
        stepped(Sequence(loaded(model, "float32")), tokens), right_params(model, tokens), TOLERANCE["float32"]
    )


@given(
    heads=st.integers(1, 4),
    dim=st.integers(1, 20),
    hidden=st.integers(1, 70),
    vocabulary=st.integers(2, 40),
    components=st.integers(0, 18),
    activation=st.sampled_from(("gelu", "swiglu", "relu")),
)
def test_every_size(heads, dim, hidden, vocabulary, components, activation):
    """For every remainder after whole vectors and whole blocks of rows."""
    width = heads * dim
    model = build(
        heads=heads,
        width=width,
        layers=1,
        vocabulary=vocabulary,
        position="none",
        mlp_ratio=hidden / width * (1.5 if activation == "swiglu" else 1),
        activation=activation,
        output=LogisticMixture(components=components) if components else decoder.Logits(),
    )
    tokens = tokens_of(model, 5)
    right = right_params(model, tokens)
    for weights in TOLERANCE:
        sequence = Sequence(loaded(model, weights))
        close(stepped(sequence, tokens), right, TOLERANCE[weights])
    close(sequence.log_probs(), model.output.log_probs(sequence.params()), 1e-5)


PAPER = {"layers": 8, "heads": 8, "width": 256, "norm": "post", "position": "concatenated", "embed": "value"}
PAPER |= {"vocabulary": 256, "output": LogisticMixture(), "final_norm": False}


@pytest.mark.parametrize("name", ["mnist-small", "paper"])
def test_a_whole_image(name):
    """784 steps within 1e-4 of the logits of the parallel form, whose sums run in another order."""
    if name == "paper":
        torch.manual_seed(0)
        model = decoder.Config(**PAPER).build().eval()
    else:
        model = checkpoint.load(name)
    tokens = tokens_of(model, 784)
    mine = stepped(Sequence(loaded(model)), tokens)
    assert (mine - right_params(model, tokens)).abs().max() < 1e-4


def test_the_weights_of_the_shipped_model_are_kept_in_16_bits():
    """They are saved in 16 bits, so that float16 loses nothing."""
    model = checkpoint.load("mnist-small")
    tokens = tokens_of(model, 50)
    whole, half = (stepped(Sequence(loaded(model, weights)), tokens) for weights in ("float32", "float16"))
    assert torch.equal(whole, half)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_becomes_float32(kind):
    """A float16 file turned into float32 holds the same numbers, and so gives the same params."""
    model = build(**KINDS[kind])
    half = loaded(model, "float16")
    content = half.to_float32()
    assert content is not None
    whole, tokens = Model(content), tokens_of(model)
    assert whole.facts == half.facts | {"weights": 32}
    assert torch.equal(stepped(Sequence(whole), tokens), stepped(Sequence(half), tokens))
    assert whole.to_float32() is loaded(model, "int8").to_float32() is None


def test_the_shipped_model_as_float32_is_the_file_of_float32():
    model = checkpoint.load("mnist-small")
    assert loaded(model, "float16").to_float32() == export.to_bytes(model, "float32")


@pytest.mark.parametrize("kind", ["plain", "kv_heads", "mixture"])
def test_int8_is_rounded_weights(kind, instruction_set):
    """The rounded weights as floats give the same: the rounding of x, 2^-16 of its largest number, is 100
    times smaller than theirs."""
    model = build(**KINDS[kind])
    tokens = tokens_of(model)
    mine = stepped(Sequence(loaded(model, "int8")), tokens)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                whole, scale = round_rows(module.weight)
                module.weight.copy_(whole * scale[:, None])
            elif isinstance(module, torch.nn.Embedding):
                module.weight.copy_(module.weight.half())
    close(mine, right_params(model, tokens), TOLERANCE["int8"] / 100)


def test_instruction_sets_with_fused_sums_agree_to_the_bit():
    """Every build sums the same lanes in the same order."""
    fused = [name for name in native.instruction_sets() if name not in ("baseline", "neon")]
    if len(fused) < 2:
        pytest.skip("needs a processor with two instruction sets of fused sums, such as AVX2 and AVX-512")
    model = build(width=96, activation="swiglu")
    found = []
    for name in fused:
        with native.use(name):
            found += [stepped(Sequence(loaded(model, weights)), tokens_of(model)) for weights in TOLERANCE]
    for one, other in zip(found, found[3:], strict=False):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", TOLERANCE)
def test_prefill_is_steps(kind, weights, instruction_set):
    """To the bit, in passes over any number of tokens."""
    model = build(**KINDS[kind])
    tokens, runtime_model = tokens_of(model), loaded(model, weights)
    one, other = Sequence(runtime_model), Sequence(runtime_model)
    right = stepped(one, tokens)
    whole = Sequence(runtime_model)
    whole.prefill(tokens)
    for part in (tokens[:1], tokens[1:7], [], tokens[7:]):
        other.prefill(part)
    for each in (whole, other):
        assert each.seen == len(tokens)
        assert torch.equal(each.params(), right[-1])
        assert each.save() == one.save()


def test_a_long_prefill_is_steps():
    """More than two passes, at sizes that fill every tile and leave a remainder."""
    model = build(width=65, heads=5, vocabulary=37, position="none", mlp_ratio=1.9)
    tokens = tokens_of(model, 43)
    for weights in TOLERANCE:
        runtime_model = loaded(model, weights)
        one, other = Sequence(runtime_model), Sequence(runtime_model)
        right = stepped(one, tokens)
        other.prefill(tokens)
        assert torch.equal(other.params(), right[-1])
        assert other.save() == one.save()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_saved_and_goes_on(kind):
    model = build(**KINDS[kind])
    tokens, runtime_model = tokens_of(model), loaded(model)
    sequence = Sequence(runtime_model)
    sequence.seed(3)
    sequence.prefill(tokens[:9])
    sequence.uniform()
    state = sequence.save()
    right, drawn = stepped(sequence, tokens[9:]), sequence.uniform()
    other = Sequence(runtime_model)
    other.prefill(tokens[:2])
    for form in (bytes, bytearray):
        other.load(form(state))
        with pytest.raises(Error, match="nothing to draw from"):
            other.params()
        assert torch.equal(stepped(other, tokens[9:]), right)
        assert other.uniform() == drawn


@given(cuts=st.lists(st.integers(0, 18), max_size=4))
@settings(max_examples=10)
def test_any_split_of_a_prefill(cuts):
    """States and params agree to the bit, whatever the pieces, with the state saved between them."""
    model = build(**KINDS["hybrid of all"])
    tokens, runtime_model = tokens_of(model), loaded(model)
    right, sequence = Sequence(runtime_model), Sequence(runtime_model)
    right.prefill(tokens)
    for part in np.split(np.array(tokens), sorted(cuts)):
        state = sequence.save()
        sequence = Sequence(runtime_model)
        sequence.load(state)
        sequence.prefill(part.tolist())
    assert sequence.save() == right.save()
    if sorted(cuts)[-1:] != [len(tokens)]:  # otherwise the last piece is empty
        assert torch.equal(sequence.params(), right.params())


@pytest.mark.parametrize("kind", ["softmax, rotary", "softmax, window", "hybrid", "hybrid of all"])
def test_sequences_of_softmax_grow(kind):
    """Beyond their initial room, token by token, at once and from a state; with a window they do not."""
    model = build(**KINDS[kind])
    runtime_model, tokens = loaded(model), tokens_of(model, 600)
    stepwise, whole, later = (Sequence(runtime_model) for _ in range(3))
    room = runtime_model.library.lrt_room(stepwise.address)
    if kind == "softmax, window":
        assert room == 2**32 - 1
    else:
        assert 256 <= room < 300
    close(stepped(stepwise, tokens), right_params(model, tokens), 2e-5)  # longer sums than in the other tests
    whole.prefill(tokens)
    later.load(stepwise.save())
    assert whole.save() == stepwise.save() == later.save()
    assert torch.equal(whole.params(), stepwise.params())
    sizes = [runtime_model.state_size(t) for t in (0, 5, 6, 600)]
    assert len(stepwise.save()) == sizes[-1]
    heads = [block.attn for block in model.blocks if isinstance(block.attn.attention, SoftmaxAttention)]
    rows = [4 * 2 * attn.kv_heads * -(-attn.dim // 16) * 16 for attn in heads]  # bytes per token
    windows = [attn.attention.config.window or math.inf for attn in heads]
    for size, t in zip(sizes, (0, 5, 6, 600), strict=True):
        assert size - sizes[0] == sum(row * min(t, w) for row, w in zip(rows, windows, strict=True))


SAMPLERS = [
    Sampler(),
    Sampler(temperature=0),
    Sampler(temperature=0.3),
    Sampler(temperature=5.0),
    Sampler(top_k=3),
    Sampler(top_k=10_000),
    Sampler(top_p=0.8),
    Sampler(top_p=1e-9),
    Sampler(temperature=1.5, top_k=20, top_p=0.95),
    Sampler(temperature=1e-30),
    Sampler(temperature=1e39),  # infinite in float32
]


@pytest.mark.parametrize("kind", [{}, {"output": LogisticMixture(components=5)}], ids=["logits", "mixture"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_the_same_numbers_draw_the_same_symbols(kind, sampler, instruction_set):
    """Unless a number falls, up to rounding, on the border between two of them."""
    model = build(vocabulary=256, **kind)
    sequence, uniforms = Sequence(loaded(model)), np.random.default_rng(0).random(100)
    for token in tokens_of(model, 5):
        sequence.step(token)
        log_probs = model.output.log_probs(sequence.params()[None])
        close(sequence.log_probs(), log_probs[0], 1e-5)
        mine = torch.tensor([sequence.sample(uniform, sampler) for uniform in uniforms])
        right = sampler.draw(model.output, sequence.params().expand(100, -1), torch.from_numpy(uniforms))
        wrong = (mine != right).nonzero()[:, 0]
        borders = sampler.probabilities(log_probs).double().cumsum(1)[0]
        for i in wrong.tolist():
            assert (borders - uniforms[i] * borders[-1]).abs().min() < 1e-5


def test_equal_symbols_draw_as_equals():
    """top_k keeps ties with its last symbol; top_p keeps the fewest symbols that hold the share."""
    model = build(vocabulary=9)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 2, 1]))
    sequence = Sequence(loaded(model))
    sequence.step(0)
    uniforms = torch.linspace(0.001, 0.999, 200, dtype=torch.float64)
    for sampler in (
        Sampler(top_k=2),
        Sampler(top_k=1),
        Sampler(top_p=0.5),
        Sampler(top_p=0.4, top_k=3),
        Sampler(temperature=1e-46),  # 0 in float32
    ):
        mine = [sequence.sample(uniform, sampler) for uniform in uniforms.tolist()]
        assert mine == sampler.draw(model.output, sequence.params().expand(200, -1), uniforms).tolist()


def test_far_levels_of_a_mixture_keep_their_logarithms():
    """Where the mass of a level is below the range of a float, at the clamped scales and at both ends."""
    model = build(vocabulary=256, output=LogisticMixture(components=4))
    for scale in (-20.0, -7.0, -3.0, 0.0, 6.9, 30.0):
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.copy_(torch.tensor([0.0, 1, -1, 2, -0.9, 0.1, 3, -3, *[scale] * 3, -1]))
        sequence = Sequence(loaded(model))
        sequence.step(0)
        right = model.output.log_probs(sequence.params().double())
        # Levels and means are accurate to about 2^-24, which the inverse scale multiplies.
        tolerance = 2**-22 * math.exp(min(7, -scale)) + 3e-6 * (1 + right.abs())
        assert ((sequence.log_probs() - right).abs() <= tolerance).all()


def test_generation_is_that_of_pytorch():
    model = checkpoint.load("mnist-small")
    options = {"steps": 60, "seed": 5, "batch": 3, "temperature": 0.9}
    drawn = torch.stack(list(runtime.stream(loaded(model), prepare_inputs(model, None, **options))), 1)
    assert torch.equal(drawn, sampling.generate(model, **options))
    prompt, lengths = torch.randint(0, 256, (3, 9)), torch.tensor([0, 4, 9])
    options = {"steps": 30, "seed": 6, "lengths": lengths, "top_k": 50}
    drawn = torch.stack(list(runtime.stream(loaded(model), prepare_inputs(model, prompt, **options))), 1)
    assert torch.equal(drawn, sampling.generate(model, prompt, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax, rotary", "softmax, window", "hybrid", "hybrid of all"])
def test_generation_of_hybrids_is_that_of_pytorch(kind):
    model = build(**KINDS[kind])
    prompt = torch.tensor([tokens_of(model, 30), tokens_of(model, 30, seed=2)])
    prompt[:, 0] = 1  # the start symbol is added automatically
    options = {"steps": 100, "seed": 7, "temperature": 0.8}
    for begin in (None, prompt):
        asked = options if begin is not None else options | {"batch": 2}
        drawn = list(runtime.stream(loaded(model), prepare_inputs(model, begin, **asked)))
        assert torch.equal(torch.stack(drawn, 1), sampling.generate(model, begin, **asked))


def test_sequences_end_as_in_pytorch():
    model = build(**KINDS["context"])
    for ends in ({"end": 3}, {"stop": [[2, 1], [4]]}, {"end": 0, "stop": [[2, 1]]}):
        options = {"steps": LENGTH, "seed": 2, "batch": 4} | ends
        drawn = list(runtime.stream(loaded(model), prepare_inputs(model, None, **options)))
        found = sampling.generate(model, **options)
        assert torch.equal(torch.stack(drawn, 1), found)
        assert (found == found[:, -1:])[:, -2].any()  # a sequence that was filled up


def test_a_whole_sequence_is_drawn_to_its_last_position():
    model = build(**KINDS["context"])
    begun = prepare_inputs(model, None, steps=LENGTH, seed=0)
    drawn = list(runtime.stream(loaded(model), begun))
    assert len(drawn) == LENGTH
    with pytest.raises(ValueError, match=f"reach {LENGTH} tokens, got token {LENGTH + 1}"):
        prepare_inputs(model, None, steps=LENGTH + 1, seed=0)


def test_the_own_generator_is_uniform_and_follows_from_its_seed():
    sequence = Sequence(loaded(build()))
    drawn = []
    for _ in range(2):
        sequence.seed(2**64 - 1)
        drawn.append([sequence.uniform() for _ in range(10_000)])
    assert drawn[0] == drawn[1]
    assert all(0 <= x < 1 for x in drawn[0])
    # Three standard errors of the mean and of the share in each tenth.
    assert abs(np.mean(drawn[0]) - 0.5) < 3 / math.sqrt(12 * 10_000)
    assert np.abs(np.histogram(drawn[0], 10, (0, 1))[0] - 1000).max() < 3 * math.sqrt(10_000 * 0.09)
    sequence.seed(1)
    assert sequence.uniform() not in drawn[0]
    sequence.seed(7)
    with pytest.raises(Error):
        sequence.sample()  # there is nothing to draw from: no number is taken
    first = sequence.uniform()
    sequence.seed(7)
    assert sequence.uniform() == first
    # SplitMix64 from 0, as the authors' program prints it, in 53 bits.
    sequence.seed(0)
    assert sequence.uniform() == (0xE220A8397B1DCDAF >> 11) * 2**-53
    with pytest.raises(Error, match="seed must be between 0 and"):
        sequence.seed(-1)


def test_what_a_sequence_refuses():
    model = build(**KINDS["learned"])
    sequence = Sequence(loaded(model))
    for call in (sequence.params, sequence.log_probs, sequence.sample):
        with pytest.raises(Error, match="nothing to draw from before a token was read"):
            call()
    sequence.prefill(tokens_of(model))
    before, params = sequence.save(), sequence.params()
    for token in (6, 2**32, 2**40, -1):
        with pytest.raises(Error, match="a token is no symbol of the model"):
            sequence.step(token)
    with pytest.raises(Error, match="a token is no symbol of the model"):
        sequence.prefill([0, 6])
    for call in (sequence.step, lambda token: sequence.prefill([0, token])):
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            call(1.7)
    with pytest.raises(Error, match="no position for so many tokens"):
        sequence.prefill([0, 0, 0])
    for uniform in (-0.1, 1.0, math.nan):
        with pytest.raises(Error, match="an option is out of bounds"):
            sequence.sample(uniform)
    assert sequence.save() == before
    assert torch.equal(sequence.params(), params)
    sequence.prefill([0, 0])
    with pytest.raises(Error, match="no position for so many tokens"):
        sequence.step(0)


def test_states_of_fewer_than_no_tokens():
    with pytest.raises(Error, match="tokens must be at least 0, got -1"):
        loaded(build(**KINDS["hybrid"])).state_size(-1)


def test_no_probabilities():
    """A symbol with sums that overflow: an error is raised, and nothing remains in working memory."""
    model = build(**KINDS["retention"])
    with torch.no_grad():
        model.embedding.table.weight[1] = 3e38
    runtime_model = loaded(model)
    sequence, fresh = Sequence(runtime_model), Sequence(runtime_model)
    state = fresh.save()
    sequence.prefill([5, 1])
    with pytest.raises(Error, match="the probabilities to draw from are no numbers"):
        sequence.sample(0.5)
    with pytest.raises(Error, match="a number that is infinite"):
        Sequence(runtime_model).load(sequence.save())
    sequence.load(state)
    for one in (sequence, fresh):
        one.step(5)
    assert sequence.save() == fresh.save()
    assert torch.equal(sequence.params(), fresh.params())


@pytest.mark.parametrize("part", range(3))  # a weight, a mean, the logarithm of a scale
def test_no_probabilities_of_a_mixture(part):
    """A component whose sum is inf - inf gives no number, as in PyTorch."""
    model = build(vocabulary=9, output=LogisticMixture(components=2))
    with torch.no_grad():
        model.head.weight[2 * part] = 3e38 * torch.randn(model.config.width).sign()
    sequence = Sequence(loaded(model))
    sequence.prefill([5])
    params = sequence.params()
    assert params.isnan().tolist() == [i == 2 * part for i in range(6)]
    assert model.output.log_probs(params[None]).isnan().all()
    assert sequence.log_probs().isnan().all()
    with pytest.raises(Error, match="the probabilities to draw from are no numbers"):
        sequence.sample(0.5)


def test_why_there_is_no_library(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path])
    runtime._load.cache_clear()
    assert "is not built (no liblintra_runtime_" in runtime.why_not()
    with pytest.raises(RuntimeError, match="is not built"):
        Model(b"")
    (tmp_path / f"liblintra_runtime_{native.instruction_set()}.so").write_bytes(b"no library")
    assert "does not load" in runtime.why_not()
    assert info([]) == 0
    assert "does not load" in capsys.readouterr().out
    monkeypatch.undo()
    assert runtime.available()

"""Generation: the RNN generates the tokens of the definition; samplers; what is refused."""

import pytest
import torch

from lintra import attention
from lintra.attention import aft, delta, gated, linear, rfa, softmax
from lintra.generation import GenerationOptions
from lintra.generation.beam import beam_search
from lintra.generation.options import Sampler
from lintra.generation.sampling import cast_state, generate, generate_reference, stream
from lintra.models import Seq2Seq, decoder, encoder, seq2seq
from lintra.nn import LogisticMixture
from lintra.nn.distributions import Categorical


def build(**changes):
    torch.manual_seed(0)
    options = {"vocabulary": 11, "layers": 2, "heads": 4, "width": 32} | changes
    return decoder.Config(**options).build().double()


KINDS = [
    {"attention": attention, "position": position, "output": output}
    for attention in (
        linear.Config(),
        softmax.Config(),
        softmax.Config(window=4),
        (linear.Config(), softmax.Config()),
    )
    for position, output in (("sinusoidal", LogisticMixture(components=3)), ("rotary", decoder.Logits()))
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 1.7, "top_k": 5, "top_p": 0.8}]
)
def test_the_rnn_gives_the_tokens_of_the_definition(kind, options):
    """For the same seed: without a prompt, with one, and with prompts of different lengths."""
    model = build(**kind)
    prompt = torch.randint(0, 11, (3, 7))
    for start in ({"batch": 3}, {"prompt": prompt}, {"prompt": prompt, "lengths": torch.tensor([7, 2, 0])}):
        found = generate(model, steps=12, seed=5, **start, **options)
        assert found.shape == (3, 12)
        assert torch.equal(found, generate_reference(model, steps=12, seed=5, **start, **options))


def build_seq2seq(**changes):
    torch.manual_seed(0)
    shape = {"layers": 1, "heads": 2, "width": 16}
    source = encoder.Config(vocabulary=7, dropout=0.5, **shape)
    options = {"vocabulary": 11, "encoder": source, **shape} | changes
    return seq2seq.Config(**options).build().double()


@pytest.mark.parametrize("changes", [{}, {"head_dim": 6}], ids=str)
@pytest.mark.parametrize("cross", [linear.Config(), softmax.Config()])
def test_given_a_source_too_the_rnn_gives_the_tokens_of_the_definition(cross, changes):
    model, source, prompt = (
        build_seq2seq(cross=cross, **changes),
        torch.randint(0, 7, (3, 5)),
        torch.zeros(3, 2).long(),
    )
    mask = torch.arange(5) < torch.tensor([[5], [2], [4]])
    for options in ({}, {"prompt": prompt, "lengths": torch.tensor([2, 0, 1])}, {"temperature": 0.0}):
        options |= {"source": source, "source_mask": mask, "steps": 12, "seed": 5}
        found = generate(model, **options)
        assert found.shape == (3, 12)
        assert torch.equal(found, generate_reference(model, **options))
    assert model.training
    alone = generate(model, source=source[1:2, :2], steps=12, temperature=0.0)
    assert torch.equal(
        generate(model, source=source, source_mask=mask, steps=12, temperature=0.0)[1:2], alone
    )
    assert generate(model, source=source, steps=0).shape == (3, 0)
    assert generate(model, source=source[:0], steps=2).shape == (0, 2)


def with_kv(change, state):
    """A state of a decoder with the kv of every layer changed."""
    layers = (x._replace(attention=x.attention._replace(kv=change(x.attention.kv))) for x in state.layers)
    return state._replace(layers=tuple(layers))


@pytest.mark.parametrize("name", [x for x in attention.names() if attention.mechanism(x).supports_bf16_state])
def test_a_state_kept_in_bfloat16_is_rounded_once_a_token(name):
    """Tokens and states equal those of a loop that rounds after the prompt and after each token."""
    model = build(attention=attention.for_length(attention.load(name).Config, 64)).eval()
    prompt = torch.randint(0, 11, (2, 7))
    found = generate(model, prompt, steps=12, temperature=0.0, state_dtype=torch.bfloat16)
    with torch.no_grad():
        params, state = model.extend(torch.cat((torch.full((2, 1), 11), prompt), 1))
        kept, tokens = cast_state(model, state, torch.bfloat16), []
        state = with_kv(lambda x: x.bfloat16().double(), state)
        for _ in range(12):
            tokens.append(model.output.log_probs(params[:, -1]).argmax(1))
            _, kept = model.extend(tokens[-1][:, None], kept)
            params, state = model.extend(tokens[-1][:, None], state)
            state = with_kv(lambda x: x.bfloat16().double(), state)
    assert torch.equal(found, torch.stack(tokens, 1))
    for layer, expected in zip(kept.layers, state.layers, strict=True):
        assert layer.attention.kv.dtype == torch.bfloat16
        for a, b in zip(layer.attention, expected.attention, strict=True):
            assert torch.equal(a.to(b.dtype), b)
        one = [torch.zeros(2, 1, 4, 8, dtype=torch.float64)] * 3
        mechanism = model.blocks[0].attn.attention
        extra = {
            name: torch.zeros(2, 1, width, dtype=torch.float64)
            for name, width in mechanism.extra_inputs().items()
        }
        with pytest.raises(TypeError, match=r"of torch\.float64, as start gives it, got torch\.bfloat16"):
            mechanism.step(*one, layer.attention, **extra)


def test_every_layer_of_a_hybrid_keeps_its_state_in_bfloat16():
    model = build(attention=(gated.Config(), delta.Config())).eval()
    kept = cast_state(model, model.start(2), torch.bfloat16)
    assert [layer.attention.kv.dtype for layer in kept.layers] == [torch.bfloat16] * 2
    assert generate(model, steps=3, state_dtype=torch.bfloat16).shape == (1, 3)


def test_what_a_decoder_reads_of_a_source_is_not_rounded():
    model, source = build_seq2seq(), torch.randint(0, 7, (3, 5))
    before = model.start(model.encode_memory(source))
    state = cast_state(model, before, torch.bfloat16)
    assert state.layers[0].own.attention.kv.dtype == torch.bfloat16
    assert state.layers[0].memory is before.layers[0].memory
    assert cast_state(model, before, None) is before
    assert generate(model, source=source, steps=3, state_dtype=torch.bfloat16).shape == (3, 3)


@pytest.mark.parametrize(
    ("mechanism", "dtype", "message"),
    [
        (linear.Config(), torch.float16, r"must be torch.bfloat16 or None, .* got torch.float16"),
        (linear.Config(), torch.int64, r"must be torch.bfloat16 or None, .* got torch.int64"),
        (softmax.Config(), torch.bfloat16, "attention 'softmax' has no state of constant size"),
        (softmax.Config(window=4), torch.bfloat16, "attention 'softmax' has no state of constant size"),
        (rfa.Config(), torch.bfloat16, "attention 'rfa' has no kv apart from its denominators"),
        (
            (gated.Config(), softmax.Config()),
            torch.bfloat16,
            "attention 'softmax' has no state of constant size",
        ),
        (aft.Config(), torch.bfloat16, "attention 'aft' has no kv apart from its denominators"),
    ],
)
def test_states_that_cannot_be_kept_so(mechanism, dtype, message):
    with pytest.raises(ValueError, match=f"state_dtype .*{message}"):
        stream(build(attention=mechanism), steps=1, state_dtype=dtype)


def test_the_definition_has_no_state_to_keep():
    with pytest.raises(ValueError, match="state_dtype must be None: there is no state"):
        generate_reference(build(), steps=1, state_dtype=torch.bfloat16)


def test_sources_are_checked():
    model, source = build_seq2seq(), torch.zeros(2, 5, dtype=torch.int64)
    for options, message in (
        ({}, "a Seq2Seq model needs a source"),
        ({"source": source, "batch": 3}, "batch must be that of the source, 2, or None; got 3"),
        ({"source": source, "prompt": source[:1]}, "batch must be that of the prompt and of the source, 1"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(model, steps=1, **options)
    with pytest.raises(ValueError, match="source goes with a Seq2Seq model, this one is a Decoder"):
        stream(build(), source=source, steps=1)
    for changes, message in (
        ({"source": torch.zeros(2, 5)}, "tokens must be int64 or int32"),
        ({"source": source + 7}, "tokens must be between 0 and 6, got 7"),
        ({"source": source, "source_mask": torch.ones(2, 9).bool()}, r"mask must be \[b=2 t=5\]"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"source does not fit: {message}"):
            stream(model, steps=1, **changes)
    listener = build_seq2seq(encoder=encoder.Config(inputs=3, layers=1, heads=2, width=16))
    with pytest.raises(
        ValueError, match=r"source does not fit: x must be \[b=2 t=4 c=3\], got shape \[2, 4, 7\]"
    ):
        stream(listener, steps=1, source=torch.zeros(2, 4, 7, dtype=torch.float64))
    for name, given in (("source", [[1, 2]]), ("source_mask", [[True, True]])):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
            stream(model, steps=1, **{"source": source, name: given})
    with pytest.raises(ValueError, match="source_mask belongs to a source"):
        stream(build(), source_mask=source > 0, steps=1)
    with pytest.raises(TypeError, match="model must be a Decoder or a Seq2Seq, got Encoder"):
        stream(encoder.Config(vocabulary=7, layers=1, heads=2, width=16).build(), steps=1)


def test_ragged_prompts_are_each_alone():
    model = build()
    prompt = torch.randint(0, 11, (2, 6))
    both = generate(model, prompt, steps=8, temperature=0.0, lengths=torch.tensor([6, 3]))
    assert torch.equal(both[1:], generate(model, prompt[1:, :3], steps=8, temperature=0.0))


def test_seeds():
    model = build()
    before = torch.get_rng_state()
    assert torch.equal(generate(model, steps=20, seed=1), generate(model, steps=20, seed=1))
    assert not torch.equal(generate(model, steps=20, seed=1), generate(model, steps=20, seed=2))
    assert not torch.equal(generate(model, steps=20), generate(model, steps=20))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mechanism_without_a_step_is_refused_before_anything_is_computed(monkeypatch):
    local = aft.Config(window=4, max_length=20)
    models = [build(attention=local), build_seq2seq(attention=local)]
    for model, options in zip(models, ({"batch": 2}, {"source": torch.randint(0, 7, (2, 5))}), strict=True):
        monkeypatch.setattr(type(model), "encode_memory", None, raising=False)
        message = r"attention 'aft' has no recurrent form with .*window=4.*: .*generate_reference"
        with pytest.raises(ValueError, match=message):
            stream(model, steps=3, **options)
        with pytest.raises(ValueError, match=message):
            beam_search(model, steps=3, beam=2, source=options.get("source"))
        monkeypatch.undo()
        assert generate_reference(model, steps=3, seed=0, **options).shape == (2, 3)


def test_stream_yields_as_it_goes_and_restores_the_mode():
    model = build(dropout=0.5).train()
    tokens = stream(model, steps=4, seed=3, batch=2)
    first = next(tokens)
    assert first.shape == (2,)
    assert not model.training
    assert torch.is_grad_enabled()
    rest = list(tokens)
    assert model.training
    assert torch.equal(torch.stack([first, *rest], 1), generate(model, steps=4, seed=3, batch=2))


def test_what_is_yielded_may_be_written_into():
    kept = []
    for token in stream(build(), batch=2, steps=6, seed=1):
        kept.append(token.clone())
        token.fill_(3)
    assert torch.equal(torch.stack(kept, 1), generate(build(), batch=2, steps=6, seed=1))


def test_streams_of_one_model_leave_each_other_alone():
    """The stream that began first ends first; the other continues as if it were alone."""
    model = build(dropout=0.5).train()
    alone = generate(model, steps=6, seed=4, batch=2)
    first, second = stream(model, steps=3, seed=3, batch=2), stream(model, steps=6, seed=4, batch=2)
    next(first)
    tokens = [next(second)]
    list(first)
    assert not model.training
    tokens += list(second)
    assert model.training
    assert torch.equal(torch.stack(tokens, 1), alone)


def test_a_stream_that_was_dropped_may_end_anywhere():
    """The garbage collector may end it even while another begins or ends."""
    model = build(dropout=0.5).train()

    class Dropped(torch.nn.Module):
        """Ends a stream of the same model while its modules are traversed."""

        def train(self, mode=True):
            dropped.close()
            return super().train(mode)

    dropped = stream(model, steps=3, batch=1)
    next(dropped)
    model.dropped = Dropped()
    drawn = stream(model, steps=2, batch=1)
    assert len(list(drawn)) == 2
    assert model.training
    assert all(module.training for module in model.modules())


def cut(row, end, stop):
    """A row up to and including its end, by the definition."""
    for n in range(1, len(row) + 1):
        if row[n - 1] == end or any(row[max(0, n - len(each)) : n] == each for each in stop):
            return row[:n]
    return row


@pytest.mark.parametrize(
    ("end", "stop"),
    [(3, []), (None, [[2, 1], [0, 3]]), (0, [[1, 1, 2], [2, 2]]), (None, [[3], [0, 0, 0, 0]])],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # float32 uses fused steps
def test_sequences_end_where_they_say(end, stop, dtype):
    """Up to the end, the tokens are those generated without one; the rest is padding."""
    model, prompt = build(vocabulary=4).to(dtype), torch.randint(0, 4, (5, 3))
    for steps, made in ((40, generate), (40, generate_reference), (2, generate)):
        options = {"steps": steps, "seed": 1, "lengths": torch.tensor([3, 0, 1, 2, 3])}
        rows = [cut(row, end, stop) for row in made(model, prompt, **options).tolist()]
        longest = max(map(len, rows))
        expected = [row + [-1 if end is None else end] * (longest - len(row)) for row in rows]
        assert made(model, prompt, end=end, stop=stop, **options).tolist() == expected
        if steps == 40:
            assert longest < steps  # all have ended
            assert len(set(map(len, rows))) > 1  # not all at once


def test_a_stream_ends_with_its_last_sequence():
    model = build(vocabulary=4)
    found = list(stream(model, steps=200, seed=0, batch=3, stop=[b"\1\2"]))
    assert 2 <= len(found) < 200
    assert torch.equal(torch.stack(found, 1), generate(model, steps=200, seed=0, batch=3, stop=([1, 2],)))
    assert sum((found[-2:][0] == 1) & (found[-1] == 2)) >= 1
    assert generate(model, steps=0, batch=3, end=1).shape == (3, 0)


def test_the_tokens_of_a_prompt_end_nothing():
    model, prompt = build(), torch.tensor([[4, 7]])
    options = {"steps": 6, "temperature": 0.0}
    rest = generate(model, prompt, **options)
    stop = [[7, int(rest[0, 0])], [4, 7]]
    assert [int(x) for x in rest[0, :2]] not in stop
    assert generate(model, prompt, stop=stop, **options).shape[1] > 1
    assert generate(model, prompt, stop=[[int(rest[0, 0])]], **options).tolist() == rest[:, :1].tolist()


def test_no_steps():
    assert generate(build(), steps=0, batch=3).shape == (3, 0)


def test_the_samplers_draw_from_their_distribution():
    """100,000 draws against the probabilities, within 4 standard deviations; the seed is fixed."""
    log_probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for sampler, expected in (
        (Sampler(), [0.4, 0.3, 0.2, 0.1]),
        (Sampler(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_p=0.71), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampler(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampler(temperature=0.0), [1, 0, 0, 0]),
        (Sampler(temperature=1e39, top_k=2), [1 / 2, 1 / 2, 0, 0]),
        (Sampler(top_k=1), [1, 0, 0, 0]),
        (Sampler(top_k=99, top_p=1.0), [0.4, 0.3, 0.2, 0.1]),
    ):
        drawn = sampler.draw(Categorical(4, 4), log_probs.expand(len(uniform), -1), uniform)
        share = torch.bincount(drawn, minlength=4) / len(uniform)
        for found, p in zip(share.tolist(), expected, strict=True):
            assert abs(found - p) <= 4 * (p * (1 - p) / len(uniform)) ** 0.5


def test_a_symbol_of_no_probability_is_never_drawn():
    log_probs = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        for sampler in (Sampler(), Sampler(temperature=1e39)):
            drawn = sampler.draw(Categorical(3, 3), log_probs, torch.tensor([uniform], dtype=torch.float64))
            assert drawn.item() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ({"steps": 1.5}, "steps must be an integer of at least 0, got 1.5"),
        ({"temperature": -0.1}, "temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"batch": 0}, "batch must be at least 1 sequence, got 0"),
        ({"end": 11}, r"end must be a symbol in 0 \.\. 10, got 11"),
        ({"end": -1}, r"end must be a symbol in 0 \.\. 10, got -1"),
        ({"stop": [[3, 11]]}, r"stop must be a symbol in 0 \.\. 10, got 11"),
        ({"stop": [[3], []]}, "stop must be sequences of at least one symbol, got an empty one"),
        ({"prompt": torch.zeros(2, 3)}, "prompt must be integers"),
        ({"prompt": torch.zeros(3, dtype=torch.int64)}, r"prompt must be integers \[b t\]"),
        ({"prompt": torch.zeros(2, 3, dtype=torch.int64), "batch": 3}, "batch must be that of the prompt, 2"),
        ({"lengths": torch.tensor([1])}, "lengths belong to a prompt"),
        (
            {"prompt": torch.zeros(2, 3, dtype=torch.int64), "lengths": torch.tensor([1])},
            r"lengths must be \[2\]",
        ),
        (
            {"prompt": torch.zeros(1, 3, dtype=torch.int64), "lengths": torch.tensor([4])},
            "lengths must be between 0 and 3 tokens",
        ),
    ],
)
def test_refuses_at_the_call(options, message):
    """The error comes before the first token is requested."""
    with pytest.raises(ValueError, match=message):
        stream(build(), **({"steps": 1} | options))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": "hot"}, TypeError, "temperature must be float, got 'hot'"),
        ({"top_k": 1.5}, TypeError, "top_k must be int or None, got 1.5"),
        ({"top_p": True}, TypeError, "top_p must be float or None, got True"),
        ({"batch": 2.0}, TypeError, "batch must be int or None, got 2.0"),
        ({"end": 2.0}, TypeError, "end must be int or None, got 2.0"),
        ({"stop": "ab"}, TypeError, "stop must be sequences of symbols, such as .*, got 'ab'"),
        ({"stop": ["ab"]}, TypeError, r"stop must be sequences of symbols, such as .*, got \['ab'\]"),
        ({"stop": [3, 4]}, TypeError, r"stop must be sequences of symbols, such as .*, got \[3, 4\]"),
        ({"seed": 1.5}, TypeError, "seed must be int or None, got 1.5"),
        ({"seed": 2**64}, ValueError, "seed must have at most 64 bits, got 18446744073709551616"),
    ],
)
def test_what_is_no_number_is_refused_at_the_call(options, error, message):
    with pytest.raises(error, match=message):
        stream(build(), steps=1, **options)
    if not options.keys() & {"seed", "batch", "end", "stop"}:
        with pytest.raises(error, match=message):
            Sampler(**options)


def test_every_seed_of_64_bits_draws():
    for seed in (-(2**63), -1, 2**64 - 1):
        assert torch.equal(*(generate(build(), steps=3, seed=seed) for _ in range(2)))


def test_an_empty_prompt_needs_a_start_symbol():
    model = build(start=False)
    for prompt in (None, torch.empty(2, 0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="no start symbol: every prompt must have at least one token"):
            generate(model, prompt, steps=1)
    assert generate(model, torch.tensor([[1]]), steps=2, seed=0).shape == (1, 2)


def test_prompts_of_any_integers():
    model = build()
    prompt = torch.tensor([[3, 4]])
    expected = generate(model, prompt, steps=3, seed=0)
    assert torch.equal(generate(model, prompt.to(torch.uint8), steps=3, seed=0), expected)
    with pytest.raises(TypeError, match=r"prompt must be a tensor of integers \[b t\], got list"):
        generate(model, [[3, 4]], steps=1)
    with pytest.raises(TypeError, match=r"lengths must be a tensor of integers \[b\], got list"):
        generate(model, torch.tensor([[3, 4]]), steps=1, lengths=[2])


def test_a_tiny_temperature_is_the_most_probable_symbol():
    log_probs = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for temperature in (1e-45, 1e-46):  # the second is 0 in float32
        probabilities = Sampler(temperature=temperature).probabilities(log_probs)
        assert torch.equal(probabilities, torch.tensor([[0.0, 1.0, 0.0]]))


def test_a_tiny_share_is_the_most_probable_symbol():
    log_probs = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p in (1e-45, 1e-46):  # the second is 0 in float32
        assert torch.equal(Sampler(top_p=top_p).probabilities(log_probs), torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("n", [8, 256])  # shares with exact sums
def test_of_equally_probable_symbols_the_first_stay(n):
    probabilities = Sampler(top_p=0.5).probabilities(torch.zeros(1, n))
    assert probabilities.nonzero()[:, 1].tolist() == list(range(n // 2))


@pytest.mark.parametrize(
    "positions", [{"position": "learned", "max_length": 6}, {"position": "grid", "grid": (2, 3)}]
)
def test_as_many_tokens_as_there_are_positions(positions):
    """Checked at the call, on every device; the longest prompt counts, and the last token is never read."""
    model, prompt = build(**positions), torch.zeros(2, 4, dtype=torch.int64)
    assert generate(model, prompt, steps=2).shape == (2, 2)
    with pytest.raises(ValueError, match="reach 6 tokens, got token 7"):
        stream(model, prompt, steps=3)
    lengths = torch.tensor([1, 3])
    assert generate(model, prompt, steps=3, lengths=lengths).shape == (2, 3)
    with pytest.raises(ValueError, match="reach 6 tokens, got token 7"):
        stream(model, prompt, steps=4, lengths=lengths)


def test_a_prompt_out_of_range():
    model = build()
    for symbol in (-1, 11, 40):  # 11 is the start symbol
        for lengths in (None, torch.tensor([2])):
            with pytest.raises(ValueError, match=f"prompt must be between 0 and 10, got {symbol}"):
                stream(model, torch.tensor([[1, symbol]]), steps=1, lengths=lengths)
        padded, lengths = torch.tensor([[1, symbol]]), torch.tensor([1])
        assert torch.equal(
            generate(model, padded, steps=3, seed=0, lengths=lengths),
            generate(model, padded[:, :1], steps=3, seed=0),
        )


def test_a_broken_model_draws_nothing():
    model = build()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="is the model sound"):
        generate(model, steps=1)


def test_a_broken_model_draws_nothing_at_temperature_zero_either():
    model = build()
    model.head.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the probabilities to draw from are no numbers"):
        generate(model, steps=3, temperature=0.0)


def test_temperature_zero_is_the_mode_of_a_mixture():
    """The most probable level of the mixture, which need not be the peak of any component."""
    output = decoder.LogisticMixture(components=3).build(256)
    logits, means = torch.tensor([0.4, 0.3, 0.3]).log(), torch.tensor([-0.5, 0.30, 0.32])
    params = torch.cat((logits, means, torch.full((3,), -3.0)))[None]
    drawn = Sampler(temperature=0).draw(output, params, torch.tensor([0.9]))
    assert drawn == output.log_probs(params).argmax(1)
    assert abs(drawn.item() / 127.5 - 1 - 0.31) < 0.01  # between the two close components


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated.*")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*")
@pytest.mark.parametrize("make", [build, build_seq2seq])
@pytest.mark.parametrize("options", [{"embed": "value"}, {"attention": softmax.Config()}], ids=str)
def test_layers_of_eight_bits_generate(make, options):
    """In place of every linear map, as PyTorch inserts them: similar parameters, and valid symbols."""
    model = make(**options).float().eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    source = torch.randint(0, 5, (2, 6)) if isinstance(model, Seq2Seq) else None
    tokens = torch.randint(0, 5, (2, 7))

    def params(model):
        return model(tokens) if source is None else model(tokens, model.encode_memory(source))

    # A weight is off by up to 2^-8 of the largest of its matrix, an activation by as much.
    expected = params(model)
    assert (params(quantised) - expected).abs().max() < 0.1 * expected.abs().max()
    for steps in (0, 20):
        drawn = generate(quantised, tokens, source=source, steps=steps, seed=0)
        assert drawn.shape == (2, steps)
        assert ((drawn >= 0) & (drawn < model.config.vocabulary)).all()


def test_options_are_those_of_the_keywords():
    model, options = build(), GenerationOptions(steps=6, temperature=0.5, top_k=3, seed=2)
    expected = generate(model, steps=6, temperature=0.5, top_k=3, seed=2)
    assert torch.equal(generate(model, None, options), expected)
    assert torch.equal(torch.stack(list(stream(model, None, options)), 1), expected)
    assert torch.equal(generate_reference(model, None, options), expected)
    with pytest.raises(TypeError, match="options are given: seed must be set in them"):
        generate(model, None, options, seed=3)
    with pytest.raises(TypeError, match="options must be GenerationOptions, got int"):
        generate(model, None, 6)

"""Beam search: exhaustive if the beam holds everything, greedy if it holds one, and states that follow."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from lintra.attention import linear, map_state, softmax
from lintra.generation.beam import beam_search
from lintra.generation.sampling import generate
from lintra.models import decoder, encoder, seq2seq

EXACT = {"rtol": 1e-8, "atol": 1e-9}  # float64: sums of a few log-probabilities
SHAPE = {"layers": 2, "heads": 2, "width": 16}
STEPS, SYMBOLS, END = 4, 3, 2


def build(**changes):
    torch.manual_seed(0)
    return sharpened(decoder.Config(**({"vocabulary": SYMBOLS} | SHAPE | changes)).build())


def build_seq2seq(**changes):
    torch.manual_seed(0)
    source = encoder.Config(vocabulary=7, **SHAPE)
    return sharpened(seq2seq.Config(vocabulary=SYMBOLS, encoder=source, **(SHAPE | changes)).build())


def sharpened(model):
    """Distributions far from uniform, so that the best hypothesis wins by a wide margin."""
    with torch.no_grad():
        model.head.weight.mul_(4)
    return model.double().eval()


def exhaustive(model, prompt, memory, penalty, end):
    """Every hypothesis of up to STEPS tokens with its probability, best first: (tokens, log_prob)."""
    every = torch.tensor(list(itertools.product(range(SYMBOLS), repeat=STEPS)))
    whole = torch.cat((prompt.expand(len(every), -1), every), 1)
    memory = [map_state(lambda x: x.repeat_interleave(len(every), 0), each) for each in memory]
    with torch.no_grad():
        log_probs = model.output.log_prob(model(model.shift(whole), *memory), whole)[:, prompt.shape[1] :]
    found = {}
    for tokens, log_prob in zip(every.tolist(), log_probs, strict=True):
        length = tokens.index(end) + 1 if end in tokens else STEPS
        found[tuple(tokens[:length])] = float(log_prob[:length].sum())
    return sorted(found.items(), key=lambda x: -x[1] / ((5 + len(x[0])) / 6) ** penalty)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize("attention", [linear.Config(), softmax.Config()])
def test_a_wide_beam_is_exhaustive(attention, end, penalty):
    model = build(attention=attention)
    prompts = torch.tensor([[0, 1, 1], [1, 0, 0]])
    lengths = torch.tensor([3, 1])
    found = beam_search(
        model, prompts, lengths=lengths, steps=STEPS, beam=100, end=end, length_penalty=penalty
    )
    for i in range(2):
        expected = exhaustive(model, prompts[i : i + 1, : lengths[i]], [], penalty, end)
        real = found.log_prob[i].isfinite()
        assert int(real.sum()) == len(expected)
        hypotheses = zip(found.tokens[i][real].tolist(), found.length[i][real].tolist(), strict=True)
        assert [tuple(tokens[:length]) for tokens, length in hypotheses] == [x for x, _ in expected]
        assert_close(found.log_prob[i][real].tolist(), [p for _, p in expected], **EXACT)


@pytest.mark.parametrize("cross", [linear.Config(), softmax.Config()])
def test_a_wide_beam_is_exhaustive_for_each_source(cross):
    model = build_seq2seq(cross=cross)
    source = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    found = beam_search(model, source=source, source_mask=mask, steps=STEPS, beam=100, end=END)
    for i in range(2):
        memory = model.encode_memory(source[i : i + 1, mask[i]])
        (best, log_prob), *_ = exhaustive(model, torch.zeros(1, 0, dtype=torch.int64), [memory], 0.0, END)
        assert tuple(found.tokens[i, 0, : found.length[i, 0]].tolist()) == best
        assert found.log_prob[i, 0].item() == pytest.approx(log_prob, abs=1e-9)


def test_a_beam_of_one_is_greedy():
    model = build_seq2seq(start=True)
    source = torch.randint(0, 7, (3, 5))
    found = beam_search(model, source=source, steps=9, beam=1)
    assert torch.equal(found.tokens[:, 0], generate(model, source=source, steps=9, temperature=0.0))
    assert (found.length == 9).all()


def test_a_narrow_beam_carries_the_state_of_what_it_keeps():
    """Its log-probabilities are those of the parallel form."""
    model = build(vocabulary=9, attention=softmax.Config())
    prompt = torch.randint(0, 9, (2, 3))
    found = beam_search(model, prompt, steps=8, beam=3)
    for i, j in itertools.product(range(2), range(3)):
        whole = torch.cat((prompt[i], found.tokens[i, j]))[None]
        with torch.no_grad():
            log_prob = model.output.log_prob(model(model.shift(whole)), whole)[0, 3:].sum()
        assert_close(found.log_prob[i, j], log_prob, **EXACT)
    assert (found.log_prob.diff(dim=1) <= 0).all()


def test_stops_when_all_have_ended():
    model = build()
    with torch.no_grad():
        model.head.bias[END] = 100.0
    found = beam_search(model, torch.tensor([[0]]), steps=50, beam=1, end=END)
    assert found.tokens.tolist() == [[[END]]]
    assert found.length.tolist() == [[1]]


def test_no_steps():
    found = beam_search(build(), torch.tensor([[0], [1]]), steps=0, beam=3)
    assert found.tokens.shape == (2, 1, 0)
    assert (found.log_prob == 0).all()


@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize("attention", [linear.Config(), softmax.Config()])
def test_no_prompts(attention, end):
    """An empty batch gives empty hypotheses; without an end symbol, they are as long as in `generate`."""
    model, prompts = build(attention=attention), torch.zeros(0, 3, dtype=torch.int64)
    found = beam_search(model, prompts, steps=STEPS, beam=2, end=end)
    assert found.length.shape == found.log_prob.shape == (0, 2)
    assert found.tokens.shape[:2] == (0, 2)
    if end is None:
        assert found.tokens.shape[2] == generate(model, prompts, steps=STEPS, seed=0).shape[1] == STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam must be an integer of at least 1, got 0"),
        ({"beam": 2.0}, r"beam must be an integer of at least 1, got 2\.0"),
        ({"end": 3}, r"end must be a symbol in 0 \.\. 2, got 3"),
        ({"length_penalty": -1.0}, r"length_penalty must be at least 0 and finite, got -1\.0"),
        ({"steps": -1}, "steps must be an integer of at least 0, got -1"),
        ({"source": torch.zeros(1, 2)}, "source goes with a Seq2Seq model, this one is a Decoder"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        beam_search(build(), **({"steps": 1, "beam": 2} | options))

"""Decoding compared with the enumeration of all paths; greedy decoding in pieces."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from lintra.speech.alignment import align
from lintra.speech.decoding import Greedy, beam, best_path, greedy
from lintra.speech.ngram import NGram
from tests.speech import paths

TINY = [(1, 1), (4, 1), (3, 3), (5, 2), (6, 3)]
ALL = 10_000  # more prefixes than occur here
TEXTS = [(1, 2, 2), (2,), (1, 1), (2, 1, 2, 1)]


def model(symbols, order=3):
    return NGram.learn(
        [[1 + (x - 1) % symbols for x in text] for text in TEXTS], order=order, symbols=symbols
    )


@pytest.mark.parametrize(("time", "symbols"), TINY)
def test_a_wide_beam_is_the_enumeration(time, symbols):
    """Every text there is, ordered by the sum over its paths."""
    log_probs = paths.draw(time, symbols)
    expected = paths.texts(log_probs)
    found = beam(log_probs, width=ALL)
    assert {each.ids: each.log_prob for each in found} == pytest.approx(expected, abs=1e-12)
    assert [each.score for each in found] == [each.log_prob for each in found]
    assert [each.score for each in found] == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-12)


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize(("time", "symbols"), TINY)
def test_a_wide_beam_with_a_language_model_is_the_enumeration(time, symbols, order):
    log_probs, lm = paths.draw(time, symbols, seed=1), model(symbols, order)
    expected = {}
    for text, log_prob in paths.texts(log_probs).items():
        prior = sum(lm.log_prob(text[:i], symbol) for i, symbol in enumerate((*text, 0)))
        expected[text] = log_prob + 0.7 * prior - 0.3 * len(text)
    found = beam(log_probs, width=ALL, lm=lm, weight=0.7, bonus=-0.3)
    assert {each.ids: each.score for each in found} == pytest.approx(expected, abs=1e-12)
    assert found[0].ids == max(expected, key=expected.__getitem__)


def test_a_language_model_decides_between_what_sounds_alike():
    """1 and 2 are equally probable in every frame; the language model has seen only 1 2."""
    log_probs = torch.tensor([[0.2, 0.4, 0.4], [0.8, 0.1, 0.1], [0.2, 0.4, 0.4]], dtype=torch.float64).log()
    lm = NGram.learn([(1, 2)] * 9, order=2, symbols=2)
    assert beam(log_probs, width=9, lm=lm, weight=1.0)[0].ids == (1, 2)
    lm = NGram.learn([(2, 1)] * 9, order=2, symbols=2)
    assert beam(log_probs, width=9, lm=lm, weight=1.0)[0].ids == (2, 1)


def test_one_text_of_many_paths_beats_the_best_path():
    """Graves' example: the best path is empty, but the text 1 is more probable."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert greedy(log_probs) == []
    assert beam(log_probs, width=2)[0].ids == (1,)
    assert beam(log_probs, width=2)[0].log_prob == pytest.approx(math.log(0.64))


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 8), st.integers(0, 99), st.booleans())
def test_any_beam_says_what_is_true(time, symbols, width, seed, prior):
    """No text occurs twice; the best is first; none is likelier than all its paths, summed by torch."""
    log_probs = paths.draw(time, symbols, seed)
    options = {"lm": model(symbols), "weight": 0.5} if prior else {}
    found = beam(log_probs, width=width, **options)
    assert 1 <= len(found) <= width
    assert len({each.ids for each in found}) == len(found)
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    for each in found:
        loss = functional.ctc_loss(
            log_probs[:, None],
            torch.tensor([each.ids], dtype=torch.int64),
            [time],
            [len(each.ids)],
            reduction="sum",
        )
        assert each.log_prob <= -float(loss) + 1e-9


def test_a_text_that_left_the_beam_and_comes_back_is_the_same():
    """Meanwhile a longer text stayed in the beam: a naive search would hold it twice."""
    weights = [[4, 3, 0], [2, 2, 3], [0, 4, 0], [1, 3, 2], [1, 3, 0], [3, 4, 1]]
    x = torch.tensor(weights, dtype=torch.float64)
    found = beam((x / x.sum(1, keepdim=True)).log(), width=4)
    assert len(found) == len({each.ids for each in found}) == 4


def test_what_is_impossible_is_not_found():
    log_probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert [each.ids for each in beam(log_probs, width=5)] == [(1,)]
    assert beam(torch.full((2, 3), -math.inf), width=5) == []


def test_no_frames_say_nothing():
    assert greedy(torch.zeros(0, 3)) == []
    (found,) = beam(torch.zeros(0, 3), width=4)
    assert found == ((), 0.0, 0.0)
    lm = model(2)
    (found,) = beam(torch.zeros(0, 3), width=4, lm=lm, weight=2.0, bonus=5.0)
    assert found.score == pytest.approx(2 * lm.log_prob((), 0))


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6))
def test_greedy_is_the_best_path_in_any_pieces(pieces):
    """Repeats across pieces, with blanks between them or without, and empty pieces."""
    path = [symbol for piece in pieces for symbol in piece]
    frames = [functional.one_hot(torch.tensor(piece, dtype=torch.int64), 3).float() for piece in pieces]
    whole = torch.cat([torch.zeros(0, 3), *frames])
    assert tuple(greedy(whole)) == paths.collapsed(path)
    stream = Greedy()
    new, spans = [], []
    for piece in frames:
        new += stream.push(piece)
        spans += stream.closed
    assert new == greedy(whole) == [span.symbol for span in best_path(whole)]
    assert [*spans, *filter(None, [stream.open])] == best_path(whole)
    said = [span.symbol for span in best_path(whole) for _ in range(span.first, span.last + 1)]
    assert said == [symbol for symbol in path if symbol]


def test_the_best_path_is_its_own_alignment():
    log_probs = paths.draw(30, 4)
    path = best_path(log_probs)
    assert len(path) > 8
    assert align(log_probs, greedy(log_probs)) == [(span.first, span.last) for span in path]


def test_greedy_is_of_the_most_probable_path():
    log_probs = paths.draw(6, 3)
    best, _ = max(paths.every(log_probs), key=lambda each: each[1])
    assert tuple(greedy(log_probs)) == paths.collapsed(best)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width must be an integer of at least 1, got 0"),
        ({"width": 2.0}, r"width must be an integer of at least 1, got 2\.0"),
        ({"width": True}, "width must be an integer of at least 1, got True"),
        ({"weight": -1.0, "lm": model(2)}, r"weight must be at least 0 and finite, got -1\.0"),
        ({"weight": math.inf, "lm": model(2)}, "weight must be at least 0 and finite, got inf"),
        ({"weight": 1.0}, r"weight needs a language model, got 1\.0 and lm=None"),
        ({"bonus": math.nan}, "bonus must be finite, got nan"),
        ({"lm": model(3)}, "lm must be of 2 symbols, got one of 3"),
    ],
)
def test_beam_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        beam(paths.draw(4, 2), **{"width": 4} | options)


@pytest.mark.parametrize(
    "decode", [greedy, lambda log_probs: beam(log_probs, width=2)], ids=["greedy", "beam"]
)
def test_log_probs_are_checked(decode):
    with pytest.raises(ValueError, match=r"log_probs must have the 2 axes \[t n\]"):
        decode(torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="a blank and a symbol, 2 columns, got 1"):
        decode(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="log_probs must be numbers, got NaN"):
        decode(torch.tensor([[0.0, math.nan]]))
    with pytest.raises(TypeError, match="log_probs must be float16"):
        decode(torch.zeros(2, 3, dtype=torch.int64))

"""n-grams: probabilities that sum to 1, the formula by hand, the counts, the file."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.audio.errors import SpeechError
from lintra.speech.ngram import NGram

TEXTS = st.lists(st.lists(st.integers(1, 3), max_size=6), min_size=1, max_size=6)


def by_definition(texts, order, symbols, history, symbol):
    """The recursion of Witten and Bell, with counts taken anew from the padded texts."""
    padded = [[0] * (order - 1) + list(text) + [0] for text in texts]
    history = ([0] * (order - 1) + list(history))[len(history) :]

    def probability(h):
        after = Counter(
            text[i] for text in padded for i in range(order - 1, len(text)) if text[i - len(h) : i] == h
        )
        less = probability(h[1:]) if h else 1 / (symbols + 1)
        if not after:
            return less
        return (after[symbol] + len(after) * less) / (after.total() + len(after))

    return probability(history)


@given(TEXTS, st.integers(1, 4), st.lists(st.integers(1, 4), max_size=5))
def test_it_is_the_definition_and_sums_to_one(texts, order, history):
    """After any history, even with unseen symbols: symbol 4 is in no text."""
    lm = NGram.learn(texts, order=order, symbols=4)
    found = np.exp(lm.log_probs(history))
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert (found > 0).all()
    expected = [by_definition(texts, order, 4, history, symbol) for symbol in range(5)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert [lm.log_prob(history, symbol) for symbol in range(5)] == lm.log_probs(history).tolist()


def test_a_case_by_hand():
    """Two texts, 1 and 1 2: the unigrams are 1 twice, 2 once and the end twice, of 3 kinds."""
    lm = NGram.learn([(1,), (1, 2)], order=2, symbols=2)
    once = {1: (2 + 3 / 3) / 8, 2: (1 + 3 / 3) / 8, 0: (2 + 3 / 3) / 8}
    assert math.exp(lm.log_prob((), 1)) == pytest.approx((2 + once[1]) / 3)
    assert math.exp(lm.log_prob((1,), 2)) == pytest.approx((1 + 2 * once[2]) / 4)
    assert math.exp(lm.log_prob((2,), 0)) == pytest.approx((1 + once[0]) / 2)
    assert math.exp(lm.log_prob((1, 2), 0)) == math.exp(lm.log_prob((2,), 0))


def test_what_is_looked_back_at():
    lm = NGram.learn([(1, 2)], order=3, symbols=2)
    assert lm.recent(()) == (0, 0)
    assert lm.recent((2,)) == (0, 2)
    assert lm.recent((1, 1, 2)) == (1, 2)
    assert lm.recent(lm.recent((2,))) == (0, 2)
    assert NGram.learn([(1, 2)], order=1, symbols=2).recent((1, 2)) == ()


def test_nothing_can_be_written_into_it():
    lm = NGram.learn([(1, 2)], order=2, symbols=2)
    with pytest.raises(ValueError, match="read-only"):
        lm.log_probs(())[0] = 1


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ([], {}, ValueError, "counts must hold at least one n-gram, got none"),
        ([[0]], {}, ValueError, r"a text must hold symbols 1 \.\. 2, got \[0\]"),
        ([[3]], {}, ValueError, r"an n-gram must be 2 integers in 0 \.\. 2, got \(0, 3\)"),
        ([[1.5]], {}, ValueError, r"an n-gram must be 2 integers in 0 \.\. 2, got \(0, 1\.5\)"),
        ([[1]], {"order": 0}, ValueError, "order must be at least 1, got 0"),
        ([[1]], {"order": 17}, ValueError, "order must be at most 16 symbols, got 17"),
        ([[1]], {"symbols": 0}, ValueError, "symbols must be at least 1, got 0"),
    ],
)
def test_learning_refuses(texts, options, error, message):
    with pytest.raises(error, match=message):
        NGram.learn(texts, **{"order": 2, "symbols": 2} | options)


@pytest.mark.parametrize("name", ["order", "symbols"])
@pytest.mark.parametrize("value", ["2", True, 2.0])
def test_sizes_are_integers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be int, got {value!r}"):
        NGram({(0, 1): 1}, **{"order": 2, "symbols": 2} | {name: value})


@settings(max_examples=20)
@given(TEXTS, st.integers(1, 4))
def test_what_is_saved_comes_back(tmp_path_factory, texts, order):
    file = tmp_path_factory.mktemp("lm") / "lm.json"
    lm = NGram.learn(texts, order=order, symbols=3)
    lm.save(file)
    again = NGram.load(file)
    assert (again.order, again.symbols, again.counts) == (order, 3, lm.counts)
    for history in ((), (1,), (1, 2, 3)):
        assert np.array_equal(again.log_probs(history), lm.log_probs(history))
    assert [x.name for x in file.parent.iterdir()] == ["lm.json"]


def test_names_of_symbols_are_saved_too(tmp_path):
    names = ("a", "b", " ")
    lm = NGram.learn([(1, 3, 2)], order=2, symbols=names)
    lm.save(tmp_path / "lm.json")
    again = NGram.load(tmp_path / "lm.json")
    assert (again.names, again.symbols, again.counts) == (names, 3, lm.counts)
    with pytest.raises(ValueError, match="symbols must have different names"):
        NGram.learn([(1,)], order=2, symbols=("a", "a"))


def damage(change):
    def damaged(file):
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return damaged


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda file: file.unlink(), r"lm\.json cannot be read"),
        (lambda file: file.write_text("{"), r"lm\.json is damaged"),
        (lambda file: file.write_text("[]"), r"lm\.json is not a language model"),
        (damage(lambda c: c.pop("order")), r"lm\.json is not a language model"),
        (damage(lambda c: c.update(more=1)), r"lm\.json is not a language model"),
        (damage(lambda c: c.update(format=2)), r"lm\.json has another format than 1"),
        (damage(lambda c: c.update(order="2")), r"lm\.json: order must be int, got '2'"),
        (damage(lambda c: c.update(order=3)), r"lm\.json: an n-gram must be 3 integers"),
        (damage(lambda c: c.update(symbols=1)), r"an n-gram must be 2 integers in 0 \.\. 1, got"),
        (damage(lambda c: c.update(symbols=["a", "a"])), "symbols must have different names"),
        (damage(lambda c: c.update(symbols=[["a"]])), "unhashable"),
        (damage(lambda c: c.update(counts=[])), "counts must hold at least one"),
        (damage(lambda c: c.update(counts=5)), r"lm\.json: .*int"),
        (damage(lambda c: c.update(counts=[[5, 1]])), r"lm\.json: .*int"),
        (damage(lambda c: c["counts"].append(c["counts"][0])), "counts must hold each n-gram once"),
        (damage(lambda c: c["counts"].append([[-1, 1], 1])), r"in 0 \.\. 2, got \(-1, 1\)"),
        (damage(lambda c: c["counts"].append([[True, 1], 1])), r"got \(True, 1\)"),
        (damage(lambda c: c["counts"].append([[1, 1], 0])), r"count of an n-gram .* in 1 \.\. 9007"),
        (damage(lambda c: c["counts"].append([[1, 1], 0.5])), r"count of an n-gram .*, got 0\.5"),
        (damage(lambda c: c["counts"].append([[1, 1], 10**400])), "count of an n-gram .*, got 1000"),
    ],
)
def test_damage_is_named(tmp_path, damaged, message):
    file = tmp_path / "lm.json"
    NGram.learn([(1, 2)], order=2, symbols=2).save(file)
    damaged(file)
    with pytest.raises(SpeechError, match=message):
        NGram.load(file)


def test_nothing_goes_on_behind_the_end():
    with pytest.raises(ValueError, match=r"must not continue after the end of a text, got \(1, 0, 2\)"):
        NGram({(1, 0, 2): 1}, order=3, symbols=2)


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpeechError, match="cannot be written"):
        NGram.learn([(1,)], order=1, symbols=1).save(tmp_path / "file" / "lm.json")

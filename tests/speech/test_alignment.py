"""Alignment compared with the best of all paths of a text; words and their times."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols
from lintra.speech.alignment import Word, align, frames_needed, word_times
from tests.speech import paths


def spans_of(path):
    """The first and last frame of each symbol of a path."""
    found = []
    for t, symbol in enumerate(path):
        if symbol and (t == 0 or path[t - 1] != symbol):
            found.append((t, t))
        elif symbol:
            found[-1] = (found[-1][0], t)
    return found


@pytest.mark.parametrize(("time", "symbols", "seed"), [(1, 1, 0), (4, 2, 1), (6, 2, 2), (5, 3, 3)])
def test_it_is_the_best_of_all_paths(time, symbols, seed):
    """For every text possible in that many frames; no two paths are equally probable here."""
    log_probs, best = paths.draw(time, symbols, seed), {}
    for path, log_prob in paths.every(log_probs):
        text = paths.collapsed(path)
        if log_prob > best.get(text, (-math.inf, None))[0]:
            best[text] = (log_prob, path)
    for text, (_, path) in best.items():
        assert align(log_probs, text) == spans_of(path)


@settings(max_examples=40)
@given(st.integers(0, 40), st.lists(st.integers(1, 3), max_size=12), st.integers(0, 99))
def test_any_alignment_is_a_path_of_the_text(time, ids, seed):
    if time < frames_needed(ids):
        with pytest.raises(SpeechError, match=f"{time} frames are too few for a text of {len(ids)} symbols"):
            align(paths.draw(time, 3, seed), ids)
        return
    path = [0] * time
    for symbol, (first, last) in zip(ids, align(paths.draw(time, 3, seed), ids), strict=True):
        assert 0 <= first <= last < time
        assert not any(path[first : last + 1])
        path[first : last + 1] = [symbol] * (last + 1 - first)
    assert paths.collapsed(path) == tuple(ids)


@given(st.lists(st.integers(1, 3), max_size=6))
def test_the_fewest_frames(ids):
    """The path has each symbol once, and a blank only between repeats."""
    least = frames_needed(ids)
    align(paths.draw(least, 3), ids)
    if least:
        with pytest.raises(SpeechError, match=f"it needs {least}"):
            align(paths.draw(least - 1, 3), ids)


def test_what_is_impossible_is_named():
    log_probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).log()
    assert align(log_probs, []) == []
    with pytest.raises(SpeechError, match="the text of 1 symbols is impossible in these 2 frames"):
        align(log_probs, [1])


@pytest.mark.parametrize("ids", [[0], [3], [-1]])
def test_ids_are_symbols(ids):
    with pytest.raises(ValueError, match=r"ids must be symbols 1 \.\. 2, got \["):
        align(paths.draw(5, 2), ids)


def test_log_probs_are_checked():
    with pytest.raises(ValueError, match="log_probs must be numbers, got NaN"):
        align(torch.full((2, 3), math.nan), [1])


def test_characters_make_words_between_spaces():
    symbols = Symbols("character", (" ", "a", "b"))
    ids = symbols.encode("ab b")
    spans = [(1, 1), (3, 4), (6, 6), (7, 9)]
    found = word_times(symbols, ids, spans, seconds=0.5, start=10.0)
    assert found == [Word("ab", 10.5, 12.5), Word("b", 13.5, 15.0)]
    assert word_times(symbols, [], [], seconds=0.5) == []
    assert word_times(symbols, [1, 1], [(0, 0), (1, 1)], seconds=0.5) == []


@given(st.text("ab ", max_size=10))
def test_the_words_are_those_of_the_text(text):
    """Even with spaces at either end, or several in a row."""
    symbols = Symbols("character", (" ", "a", "b"))
    ids = [1 + " ab".index(x) for x in text]
    found = word_times(symbols, ids, [(i, i) for i in range(len(ids))], seconds=1.0)
    assert [word.text for word in found] == text.split()


def test_words_and_phonemes_stand_for_themselves():
    for symbols in (Symbols("word", ("a", "b")), Symbols("phoneme", ("a", "b"), (("x", ("a", "b")),))):
        found = word_times(symbols, [1, 2], [(0, 1), (2, 2)], seconds=1.0)
        assert found == [Word("a", 0.0, 2.0), Word("b", 2.0, 3.0)]


def test_every_symbol_needs_its_span():
    with pytest.raises(ValueError, match="zip"):
        word_times(Symbols("word", ("a",)), [1, 1], [(0, 0)], seconds=1.0)

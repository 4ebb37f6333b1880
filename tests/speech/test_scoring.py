"""Edits compared with brute force and torchmetrics; the bootstrap where its interval is known."""

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.text import char_error_rate, word_error_rate

from lintra.speech.scoring import Edits, bootstrap, character_edits, word_edits

SHORT = st.lists(st.integers(0, 2), max_size=5)
TEXT = st.text("ab ", max_size=12)


def all_alignments(reference, hypothesis):
    """(substitutions, insertions, deletions) of every way to traverse both, by the definition."""

    @cache
    def ways(i, j):
        if i == len(reference) and j == len(hypothesis):
            return frozenset([(0, 0, 0)])
        found = set()
        if i < len(reference) and j < len(hypothesis):
            other = reference[i] != hypothesis[j]
            found |= {(s + other, a, d) for s, a, d in ways(i + 1, j + 1)}
        if j < len(hypothesis):
            found |= {(s, a + 1, d) for s, a, d in ways(i, j + 1)}
        if i < len(reference):
            found |= {(s, a, d + 1) for s, a, d in ways(i + 1, j)}
        return frozenset(found)

    return ways(0, 0)


@given(SHORT, SHORT)
def test_the_fewest_edits_and_of_these_the_most_substitutions(reference, hypothesis):
    expected = min(all_alignments(reference, hypothesis), key=lambda each: (sum(each), -each[0]))
    edits = Edits.between(reference, hypothesis)
    assert (edits.substitutions, edits.insertions, edits.deletions) == expected
    assert (edits.total, edits.length) == (sum(expected), len(reference))


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_rates_are_those_of_torchmetrics(pairs):
    references, hypotheses = zip(*pairs, strict=True)
    for ours, theirs in ((character_edits, char_error_rate), (word_edits, word_error_rate)):
        edits = sum((ours(*pair) for pair in pairs), Edits())
        if edits.length:
            assert edits.rate == pytest.approx(float(theirs(hypotheses, references)), abs=1e-6)  # float32


@given(SHORT, SHORT)
def test_the_other_way_round_insertions_are_deletions(one, other):
    there, back = Edits.between(one, other), Edits.between(other, one)
    assert (there.substitutions, there.insertions) == (back.substitutions, back.deletions)
    assert there.insertions - there.deletions == len(other) - len(one)


def test_edits_by_hand():
    assert word_edits("the cat sat", "the  bat sat down") == Edits(1, 1, 0, 3)
    assert word_edits("a b c", "b c") == Edits(0, 0, 1, 3)
    assert character_edits("abc", "abc") == Edits(0, 0, 0, 3)
    assert character_edits("ab c", "abc") == Edits(0, 0, 1, 4)
    assert Edits.between(["th", "a"], ["a", "th"]) == Edits(2, 0, 0, 2)
    assert Edits(1, 2, 3, 4) + Edits(5, 6, 7, 8) == Edits(6, 8, 10, 12)


def test_rates_of_nothing():
    assert character_edits("", "").rate == 0
    assert character_edits("", "a").rate == math.inf
    assert character_edits("a", "").rate == 1
    assert character_edits("a", "bcd").rate == 3


def test_a_long_text():
    """Every third of 3,000 words is missing: computed by rows, without a full table in Python."""
    words = [str(i) for i in range(3_000)]
    kept = [word for i, word in enumerate(words) if i % 3]
    assert word_edits(" ".join(words), " ".join(kept)) == Edits(0, 0, 1_000, 3_000)


def test_utterances_alike_leave_no_doubt():
    assert bootstrap([Edits(1, 0, 0, 4)] * 7) == (0.25, 0.25)
    assert bootstrap([Edits(1, 0, 1, 4)]) == (0.5, 0.5)
    assert bootstrap([Edits()]) == (0, 0)


def test_the_interval_is_that_of_the_binomial():
    """100 utterances of one word, 30 of them wrong: the number wrong in a sample is binomial (100, 0.3)."""
    edits = [Edits(substitutions=int(i < 30), length=1) for i in range(100)]

    def quantile(p):
        total = 0.0
        for k in range(101):
            total += math.comb(100, k) * 0.3**k * 0.7 ** (100 - k)
            if total >= p:
                return k / 100
        raise AssertionError

    for level in (0.5, 0.95):
        low, high = bootstrap(edits, level=level)
        assert abs(low - quantile((1 - level) / 2)) <= 0.01  # one word: percentiles of 10,000 draws
        assert abs(high - quantile((1 + level) / 2)) <= 0.01


def test_an_utterance_goes_in_as_a_whole():
    """Clustered errors are weaker evidence than the same number of scattered ones."""
    together = [Edits(10, 0, 0, 10)] * 3 + [Edits(0, 0, 0, 10)] * 7
    apart = [Edits(3, 0, 0, 10)] * 10
    assert bootstrap(apart) == (0.3, 0.3)
    low, high = bootstrap(together)
    assert low < 0.1
    assert high > 0.5


def test_the_rate_is_of_sums():
    """A long utterance counts for more: drawing two of two has these outcomes, and the one between."""
    low, high = bootstrap([Edits(0, 0, 0, 1), Edits(9, 0, 0, 9)], level=0.9)
    assert (low, high) == (0, 1)
    middle, _ = bootstrap([Edits(0, 0, 0, 1), Edits(9, 0, 0, 9)], level=0.01)
    assert middle == pytest.approx(0.9)


def test_a_seed_is_an_interval():
    edits = [Edits(i % 3, 0, 0, 5 + i % 4) for i in range(50)]
    assert bootstrap(edits, seed=1) == bootstrap(iter(edits), seed=1)
    assert len({bootstrap(edits, seed=i, resamples=50) for i in range(5)}) > 1


def test_empty_references_do_not_spoil_it():
    low, high = bootstrap([Edits(0, 2, 0, 0), Edits(1, 0, 0, 4)])
    assert low == 0.25
    assert high == math.inf


@pytest.mark.parametrize(
    ("edits", "options", "message"),
    [
        ([], {}, "edits must be of at least one utterance, got none"),
        ([Edits()], {"level": 1.0}, r"level must be in \(0, 1\), got 1\.0"),
        ([Edits()], {"level": math.nan}, r"level must be in \(0, 1\), got nan"),
        ([Edits()], {"resamples": 0}, "resamples must be at least 1, got 0"),
    ],
)
def test_bootstrap_refuses(edits, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(edits, **options)

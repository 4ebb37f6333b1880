"""Subtitles: readable cues, the same whether their words come at once or one by one."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from lintra.speech.alignment import Word
from lintra.speech.subtitles import LINE, LINES, LONGEST, PAUSE, SHORTEST, Cue, Subtitles, srt

# A pause, the length of a word in seconds, and its text.
SPOKEN = st.lists(
    st.tuples(st.sampled_from([0.02, 0.3, 0.9, 1.0, 2.5]), st.floats(0.04, 9.0), st.text("ab-", min_size=1)),
    max_size=30,
)


def said(spoken) -> list[Word]:
    words, now = [], 0.0
    for pause, length, text in spoken:
        words.append(Word(text, now + pause, now + pause + length))
        now = words[-1].end
    return words


def cues(words, duration):
    subtitles = Subtitles()
    return subtitles.push(words) + subtitles.finish(duration)


@given(SPOKEN)
def test_cues_hold_every_word_and_can_be_read(spoken):
    """In order, one after another, within the limits, except for a single word that exceeds them."""
    words = said(spoken)
    duration = words[-1].end + 0.1 if words else 0.1
    found = cues(words, duration)
    assert "".join("".join(cue.lines) for cue in found).replace(" ", "") == "".join(x.text for x in words)
    place, ends = 0, 0.0
    for cue in found:
        own, text = [], re.sub(" ", "", "".join(cue.lines))
        while text:
            own.append(words[place])
            assert text.startswith(own[-1].text)
            text, place = text.removeprefix(own[-1].text), place + 1
        assert cue.start == own[0].start >= ends
        assert own[-1].end <= cue.end <= max(own[-1].end, cue.start + SHORTEST)
        assert cue.end <= duration
        ends = cue.end
        if len(own) > 1:
            assert len(cue.lines) <= LINES
            assert own[-1].end - cue.start <= LONGEST + 1e-9
            assert all(b.start - a.end < PAUSE for a, b in itertools.pairwise(own))
        assert all(len(line) <= LINE for line in cue.lines)


@given(SPOKEN, st.lists(st.floats(0, 60), max_size=20))
def test_cues_are_those_of_the_whole_while_words_come(spoken, times):
    """At any time: the words that have ended, and the one being spoken."""
    words = said(spoken)
    duration = words[-1].end + 0.5 if words else 0.5
    subtitles, found, place = Subtitles(), [], 0
    for now in [*sorted(x for x in times if x < duration), duration]:
        new = [word for word in words[place:] if word.end <= now]
        place += len(new)
        begun = [word._replace(end=now) for word in words[place:] if word.start < now]
        found += subtitles.push(new, *begun[:1], seconds=now)
    assert found + subtitles.finish(duration) == cues(words, duration)


def test_a_cue_is_out_when_it_is_complete():
    one, two = Word("one", 1.0, 1.4), Word("two", 2.3, 2.6)
    subtitles = Subtitles()
    assert subtitles.push([one], seconds=2.3) == []
    assert subtitles.push([], two, seconds=2.6) == []
    assert subtitles.push([two], seconds=3.5) == []
    assert subtitles.push([], seconds=3.6) == [Cue(("one two",), 1.0, 2.6)]
    assert subtitles.finish(9.0) == []
    assert subtitles.push([one]) == []
    assert subtitles.push([], Word("thr", 2.4, 2.5), seconds=2.5) == [Cue(("one",), 1.0, 1.0 + SHORTEST)]


def test_no_cue_is_shown_into_the_next_or_beyond_the_recording():
    long = "x" * LINE
    words = [Word("a", 0.0, 0.1), Word(long, 0.2, 0.3), Word(long, 0.4, 0.5)]
    assert cues(words, 0.6) == [Cue(("a", long), 0.0, 0.4), Cue((long,), 0.4, 0.6)]


def test_the_form_of_subrip():
    text = srt(3, Cue(("one", "two"), 3_725.0004, 86_399.9996))
    assert text == "3\n01:02:05,000 --> 24:00:00,000\none\ntwo\n\n"

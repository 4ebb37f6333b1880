"""Lines for the tools of NIST: a name is one word, and belongs to one recording."""

import re

from hypothesis import given
from hypothesis import strategies as st

from lintra.speech.alignment import Word
from lintra.speech.nist import ctm, names, stm, trn


@given(own=st.lists(st.text("ab -2\t()", min_size=1), max_size=8))
def test_names_are_different_words(own):
    """Names are kept where possible."""
    for unwanted in (r"\s", r"[\s()]"):
        found = names(own, unwanted)
        assert len(set(found)) == len(own)
        assert not any(re.search(unwanted, name) for name in found)
        if own:
            assert found[0] == re.sub(unwanted, "_", own[0])


def test_lines():
    """Times are in milliseconds; the end is rounded as well."""
    assert ctm("a", Word("one", 0.0004, 1.0006)) == "a 1 0.000 1.001 one"
    assert ctm("a", Word("one", 0.1234, 0.3456)) == "a 1 0.123 0.223 one"
    assert stm("a", None, 1.5, "one two") == "a 1 a 0.000 1.500 one two"
    assert stm("a", "an n", 1.5, "") == "a 1 an_n 0.000 1.500 "
    assert trn("u1", "one two") == "one two (u1)"
    assert trn("u1", "") == "(u1)"

"""Symbols: from text to numbers and back, what they are learned from, what they refuse."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lintra import checkpoint
from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols, learn, read_lexicon

LEXICON = {"TWO": ("T", "UW"), "TOO": ("T", "UW"), "EIGHT": ("EY", "T"), "A": ("EY",)}


@given(st.lists(st.text(), min_size=1).filter(lambda texts: "".join(texts).strip()))
def test_characters_and_back(texts):
    symbols = learn(texts, "character")
    assert list(symbols.names) == sorted(symbols.names)
    for text in texts:
        ids = symbols.encode(text)
        assert all(1 <= i <= len(symbols.names) for i in ids)
        assert symbols.decode(ids) == " ".join(unicodedata.normalize("NFC", text).split())


@given(st.lists(st.text("AB é\t\u3000", min_size=1), min_size=1).filter(lambda texts: "".join(texts).split()))
def test_words_and_back(texts):
    symbols = learn(texts, "word")
    for text in texts:
        assert symbols.decode(symbols.encode(text)) == " ".join(text.split())


def test_what_is_the_same_text():
    symbols = learn(["caf\u00e9 au lait"], "character")
    composed = symbols.encode("caf\u00e9 au")
    assert symbols.encode(" cafe\u0301 \t au\r\n") == composed
    assert symbols.decode(composed) == "caf\u00e9 au"
    assert symbols.encode("") == []
    with pytest.raises(SpeechError, match="'C', character 1 of 'Caf"):
        symbols.encode("Caf\u00e9")


def test_phonemes_are_the_first_pronunciation():
    symbols = learn(["TWO EIGHT"], "phoneme", LEXICON)
    assert symbols.names == ("EY", "T", "UW")
    assert symbols.encode("TOO  EIGHT") == [2, 3, 1, 2]
    assert symbols.decode(symbols.encode("TOO EIGHT")) == "T UW EY T"


@pytest.mark.parametrize(
    "symbols",
    [learn(["AB C"], "character"), learn(["AB C"], "word"), learn([], "phoneme", LEXICON)],
    ids=lambda symbols: symbols.unit,
)
def test_a_configuration_in_json(symbols):
    content = json.loads(json.dumps(checkpoint.to_json(symbols)))
    again = checkpoint.from_json(Symbols, content, "symbols")
    assert again == symbols
    assert hash(again) == hash(symbols)


@pytest.mark.parametrize(
    ("unit", "text", "message"),
    [
        ("character", "TWO X", "'X', character 5 of 'TWO X', is none of the 8 known"),
        ("word", "TWO TWO THREE", "'THREE', word 3 of 'TWO TWO THREE', is none of the 2 known"),
        ("phoneme", "TWO THREE", "'THREE', word 2 of 'TWO THREE', is none of the 4 known"),
        ("word", "NO " + "TWO " * 99, r"'NO', word 1 of 'NO TWO .*\.\.\.', is none"),
    ],
)
def test_unknown_symbols_are_named_with_their_place(unit, text, message):
    symbols = learn(["TWO EIGHT"], unit, LEXICON if unit == "phoneme" else None)
    with pytest.raises(SpeechError, match=message):
        symbols.encode(text)


@pytest.mark.parametrize("ids", [[0], [1, 4], [-1]])
def test_numbers_of_no_symbol_are_refused(ids):
    with pytest.raises(ValueError, match=f"ids must be between 1 and 3, got {ids[-1]}"):
        Symbols("character", ("A", "B", "C")).decode(ids)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("letter", ("A",)), TypeError, "unit must be 'character' or 'phoneme' or 'word', got 'letter'"),
        (("character", ["A"]), TypeError, "names must be several str"),
        (("character", ()), ValueError, "names must hold at least one symbol"),
        (("character", ("A", "B", "A")), ValueError, "names must all be different, got 'A' twice"),
        (("character", ("A", "BC")), ValueError, "names must each be one character, got 'BC'"),
        (("character", ("",)), ValueError, "names must each be one character, got ''"),
        (("word", ("A B",)), ValueError, "names must each be one word, got 'A B'"),
        (("word", (" ",)), ValueError, "names must each be one word, got ' '"),
        (("word", ("A",), (("A", ("A",)),)), ValueError, "a lexicon belongs to phonemes, got 1 words of one"),
        (("phoneme", ("A",)), ValueError, "a lexicon belongs to phonemes, got 0 words of one"),
        (("phoneme", ("A",), (("X", ("B",)),)), ValueError, r"the phonemes of each word, got 'X': \('B',\)"),
        (("phoneme", ("A",), (("X", ()),)), ValueError, "the phonemes of each word, got 'X'"),
        (
            ("phoneme", ("A",), (("X", ("A",)),) * 2),
            ValueError,
            "lexicon must hold a word once, got 'X' twice",
        ),
    ],
)
def test_what_symbols_are_not(arguments, error, message):
    with pytest.raises(error, match=message):
        Symbols(*arguments)


def test_what_cannot_be_learned_from():
    with pytest.raises(SpeechError, match="no word to learn: every transcript is empty"):
        learn(["", " \n"], "word")
    with pytest.raises(ValueError, match="phonemes need a lexicon"):
        learn(["A"], "phoneme")
    with pytest.raises(ValueError, match="a lexicon belongs to phonemes"):
        learn(["A"], "word", LEXICON)
    with pytest.raises(SpeechError, match="'THREE', word 2 of"):
        learn(["TWO THREE"], "phoneme", LEXICON)


def test_a_lexicon_of_either_form(tmp_path):
    path = tmp_path / "lexicon.txt"
    path.write_bytes(
        b"\xef\xbb\xbf;;; a comment\r\nTOMATO  T AH M EY T OW\r\n\r\nTOMATO(2)  T AH M AA T OW\r\n"
        b"\xc3\x89T\xc3\x89 EY T EY # foreign\r\nTOMATO T\r\n# a\r\n"
    )
    assert read_lexicon(path) == {
        "TOMATO": ("T", "AH", "M", "EY", "T", "OW"),
        "\u00c9T\u00c9": ("EY", "T", "EY"),
        "#": ("a",),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"TWO T UW\nALONE\n", r"lexicon, line 2: expected a word and its phonemes, got 'ALONE'"),
        (b"TWO # T\n", "line 1: expected a word and its phonemes"),
        (b"", "lexicon holds no words"),
        (b"TWO T UW\n\xff\xfeE\n", r"lexicon, line 2 is not UTF-8 text \(byte 1\)"),
    ],
)
def test_bad_lexicons_are_named(tmp_path, content, message):
    (tmp_path / "lexicon").write_bytes(content)
    with pytest.raises(SpeechError, match=message):
        read_lexicon(tmp_path / "lexicon")


def test_no_lexicon(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SpeechError, match="cannot be read"):
            read_lexicon(path)

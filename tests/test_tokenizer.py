"""Subword tokens: trained, encoded in pieces, decoded one by one."""

import random
import sys

import numpy as np
import pytest

from lintra.io.files import Error
from lintra.tokenizer import BYTES, END, TextStream, Tokenizer, cut, pieces

tokenizers = pytest.importorskip("tokenizers")

LINES = "".join(f"Line {i}, as others are.\n\n  naïve 日本 🎉🎉\n" for i in range(300))


@pytest.fixture(scope="module")
def learned():
    return Tokenizer.learn(pieces(LINES.encode()), 400)


def other(kind: str) -> Tokenizer:
    """Tokenizers with decoders that treat the first token specially, or assemble characters from bytes."""
    words = {
        "▁": 0,
        "▁a": 1,
        "b": 2,
        "▁b": 3,
        "<0xE6>": 4,
        "<0x97>": 5,
        "<0xA5>": 6,
        "a": 7,
        "##b": 8,
        "[UNK]": 9,
    }
    package = tokenizers
    if kind == "wordpiece":
        made = package.Tokenizer(package.models.WordPiece(words, unk_token="[UNK]"))
        made.decoder = package.decoders.WordPiece()
    else:
        made = package.Tokenizer(package.models.BPE(words, [], byte_fallback=True))
        metaspace = package.decoders.Metaspace()
        fallback = package.decoders.ByteFallback()
        made.decoder = package.decoders.Sequence([fallback, package.decoders.Fuse(), metaspace])
        if kind == "llama":
            strip = package.decoders.Strip(" ", 1, 0)
            replace = package.decoders.Replace("▁", " ")
            made.decoder = package.decoders.Sequence([replace, fallback, package.decoders.Fuse(), strip])
    return Tokenizer(made.to_str().encode())


def test_text_comes_back(learned):
    assert learned.vocabulary == 400
    assert learned.decode(learned.encode(LINES)) == LINES
    assert learned.encode(END) == [learned.token(END)] == [0]
    assert learned.token("nothing") is None
    every = bytes(range(1, 128)).decode() + "é日🎉"
    assert learned.decode(learned.encode(every)) == every


def test_learning_twice_is_the_same(learned):
    assert Tokenizer.learn(pieces(LINES.encode()), 400).sum == learned.sum


def test_few_pairs_give_few_tokens():
    assert Tokenizer.learn(["ab"], 400).vocabulary == BYTES + 2


def test_a_file_is_read_as_it_was_written(learned, tmp_path):
    learned.save(tmp_path / "t.json")
    read = Tokenizer.read(tmp_path / "t.json")
    assert (read.sum, read.encode(LINES)) == (learned.sum, learned.encode(LINES))


def test_what_a_file_would_cut_or_pad_is_not():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    read = Tokenizer(tokenizer.to_str().encode())
    assert read.encode("a b b") == [0, 5, 5]
    assert read.vocabulary == 6  # numbers 0 .. 5, although there are two words


@pytest.mark.parametrize(("token", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_the_smallest_type_holds_the_last_token(token, dtype):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": token}, unk_token="a"))
    (found,) = Tokenizer(made.to_str().encode()).encode_all(["a"])
    assert (found.dtype, found.tolist()) == (dtype, [token])


@pytest.mark.parametrize("size", [200, 1_000, 2**16])
def test_pieces_are_encoded_as_the_whole(learned, size):
    parts = list(pieces(LINES.encode(), size))
    assert "".join(parts) == LINES
    assert max(len(part.encode()) for part in parts) <= 2 * size
    assert [x for part in learned.encode_all(parts) for x in part.tolist()] == learned.encode(LINES)


@pytest.mark.parametrize("text", ["日" * 999, " " * 999, "a" * 999, "", "é"])
def test_pieces_of_what_has_no_lines_and_words(text):
    assert "".join(pieces(text.encode(), 100)) == text


DECODERS = ["bytes", "gpt2", "metaspace", "llama", "wordpiece"]


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("prompt", [0, 7])
def test_streamed_text_is_the_decoded_one(learned, kind, prompt):
    """For any tokens, even parts of characters; if each byte is a token, for whole characters."""
    if kind == "bytes":
        vocabulary, decode = 256, lambda tokens: bytes(tokens).decode(errors="replace")
    else:
        made = learned if kind == "gpt2" else other(kind)
        vocabulary, decode = made.vocabulary, made.decode
    draw = random.Random(0)
    choices = [[x] for x in range(vocabulary)]
    if kind in ("metaspace", "llama"):
        choices = [[4, 5, 6] if choice[0] in (4, 5, 6) else choice for choice in choices]
    for n in (0, 1, 2, 5, 300):
        given, more = ([x for _ in range(k) for x in draw.choice(choices)] for k in (prompt, n))
        given += [65] * (prompt if kind in ("bytes", "gpt2") else 0)  # a prompt never ends inside a character
        stream = TextStream(decode, prompt=given)
        found = "".join(map(stream.push, more)) + stream.finish()
        assert decode(given) + found == decode(given + more)
        assert stream.push(1) == stream.finish() == ""


def test_a_character_comes_when_it_is_whole():
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert [stream.push(x) for x in "a日b".encode()] == ["a", "", "", "日", "b"]
    assert [stream.push(x) for x in (0xE6, 0x97, 0x41)] == ["", "", "\ufffdA"]
    assert [stream.push(x) for x in (0xE6, 0xE6)] == ["", ""]
    assert stream.finish() == "\ufffd\ufffd"


@pytest.mark.parametrize("stop", [("e 1", "x"), ("others", "re.\n\n"), ("日",), (" 🎉",)])
def test_stop_texts_whatever_tokens_they_are_in(learned, stop):
    tokens = learned.encode(LINES)
    stream = TextStream(learned.decode, stop=stop)
    found = "".join(map(stream.push, tokens)) + stream.finish()
    assert found == LINES[: min(LINES.find(each) + len(each) for each in stop if each in LINES)]
    assert stream.ended


def test_of_stop_texts_in_one_token_the_first_to_end_counts():
    stream = TextStream(lambda tokens: "abcd" * len(tokens), stop=("cd", "b"))
    assert (stream.push(0), stream.ended) == ("ab", True)


def test_the_prompt_does_not_stop_and_the_end_is_not_said(learned):
    prompt, more = learned.encode("stop here, "), learned.encode("then stop here")
    stream = TextStream(learned.decode, end=0, stop=["stop"], prompt=prompt)
    assert "".join(map(stream.push, more)) == "then stop"
    stream = TextStream(learned.decode, end=0)
    assert "".join(map(stream.push, [*more, 0, *more])) == "then stop here"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is not a tokenizer of Hugging Face's tokenizers: invalid type"),
        ('{"a": 1}', "is not a tokenizer"),
        (
            '{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{},"merges":[]}}',
            "without any token",
        ),
    ],
)
def test_what_is_no_tokenizer(tmp_path, content, message):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(Error, match=rf"t\.json .*{message}"):
        Tokenizer.read(tmp_path / "t.json")


def test_no_file(tmp_path):
    with pytest.raises(Error, match=r"nothing\.json cannot be read: No such file"):
        Tokenizer.read(tmp_path / "nothing.json")
    with pytest.raises(Error, match=r"is a folder: name the tokenizer\.json in it"):
        Tokenizer.read(tmp_path)


@pytest.mark.parametrize("tokens", [-1, BYTES, 10**9, 2**64])
def test_vocabularies_that_cannot_be_learned(tokens):
    with pytest.raises(ValueError, match=rf"at least 257, for all bytes .* at most 4,194,304, got {tokens}"):
        Tokenizer.learn(["a"], tokens)


def test_a_text_of_which_a_tokenizer_has_no_tokens(tmp_path):
    """A vocabulary of words without a token for unknown ones."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]"))
    made.save(str(tmp_path / "words.json"))
    read = Tokenizer.read(tmp_path / "words.json")
    assert read.encode("a") == [0]
    for encode in (lambda: read.encode("b"), lambda: read.encode_all(["a", "b"])):
        with pytest.raises(Error, match=r"words\.json cannot encode this text: .*Missing \[UNK\] token"):
            encode()


def test_without_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lintra\[tokenizers\]'"):
        Tokenizer.read(tmp_path / "t.json")


def test_lines_that_end_as_on_windows_are_cut_between():
    text = b"one two\r\nthree\r\n\r\nfour"
    assert cut(text, 1, len(text)) == len(b"one two\r\n")
    assert cut(text, 10, len(text)) == len(text)  # nowhere else

"""Text as subword tokens: the same text is trained on and held out as with bytes; bits are per byte."""

import math
import os
from functools import partial

import numpy as np
import pytest
import torch

from lintra.attention import linear
from lintra.io.files import Error
from lintra.tasks import DataError, text, text_classification
from lintra.tasks.datasets import subwords
from lintra.tokenizer import Tokenizer, pieces
from tests.io.turns import made_by_another

tokenizers = pytest.importorskip("tokenizers")

WORDS = "".join(f"{i} naïve words, as before. 日本\n" for i in range(60)).encode()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "words.txt").write_bytes(WORDS)
    return tmp_path / "words.txt"


@pytest.fixture
def learned(tmp_path):
    Tokenizer.learn(pieces(WORDS), 300).save(tmp_path / "t.json")
    return tmp_path / "t.json"


def task(path, tokenizer, **settings):
    return text.Config(data=str(path), tokenizer=str(tokenizer), **({"length": 8} | settings)).build()


def test_the_parts_are_those_of_bytes_up_to_a_character(file, learned):
    built = task(file, learned)
    train, validate = (built.decode(x.text.tolist()) for x in (built.train, built.validate))
    assert (train + validate).encode() == WORDS
    cut = len(WORDS) - len(WORDS) // 10
    assert 0 <= cut - len(train.encode()) < 4
    assert built.vocabulary == built.model(linear.Config()).vocabulary == 300
    piece = built.train[5]["tokens"]
    assert (len(piece), piece.dtype) == (8, torch.int64)
    assert built.decode(built.to_tokens("naïve 日")[0].tolist()) == "naïve 日"


def test_bits_per_byte_are_all_bits_over_all_bytes(file, learned):
    """For a model that finds all tokens equally likely, and pieces that leave nothing out."""
    built = task(file, learned)
    built = task(file, learned, length=len(built.validate.text))
    model = built.model(linear.Config()).build().eval()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    score = built.score(model, built.validate.__getitems__([0]))
    tokens, size = len(built.validate.text), len(built.decode(built.validate.text.tolist()).encode())
    assert tokens < size
    assert score["bits_per_token"].item() == pytest.approx(math.log2(300), rel=1e-5)
    assert score["bits_per_byte"].item() == pytest.approx(math.log2(300) * tokens / size, rel=1e-5)
    assert score["weight"].item() == tokens


def test_tokens_of_single_bytes_score_as_bytes_do(tmp_path):
    """The tokens have the numbers of the bytes, so that the same model gives the same for both."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({"x": 0}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    printed = [ord(x) for x in alphabet if ord(x) < 256]
    shifted = {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(printed)))}
    words = {shifted.get(b, chr(b)): b for b in range(256)}
    of_bytes.model = tokenizers.models.BPE(words, [])
    of_bytes.save(str(tmp_path / "t.json"))
    (tmp_path / "words.txt").write_bytes(WORDS)
    ours = task(tmp_path / "words.txt", tmp_path / "t.json")
    plain = text.Config(data=str(tmp_path / "words.txt"), length=8).build()
    assert np.array_equal(ours.train.text, plain.train.text)
    model = plain.model(linear.Config()).build().eval()
    batch = plain.validate.__getitems__(range(4))
    score, expected = ours.score(model, batch), plain.score(model, batch)
    assert score["bits_per_byte"] == score["bits_per_token"] == expected["bits_per_byte"]


def test_a_large_text_is_encoded_once(file, learned, tmp_path, monkeypatch):
    monkeypatch.setattr(subwords, "cache_dir", lambda name: tmp_path / "cache" / name)
    assert not list(tmp_path.glob("cache/tokens/*"))
    expected = task(file, learned).train.text
    assert not list(tmp_path.glob("cache/tokens/*"))  # nothing is cached for a small text
    monkeypatch.setattr(subwords, "KEPT_FROM", 100)
    assert np.array_equal(task(file, learned).train.text, expected)
    kept = list(tmp_path.glob("cache/tokens/*.npy"))
    assert len(kept) == 2  # the training text and the held-out one
    with monkeypatch.context() as patch:
        patch.setattr(subwords, "_encode", None)
        again = task(file, learned)
        assert np.array_equal(again.train.text, expected)
        assert len(again.train[0]["tokens"]) == 8
    for each in kept:
        each.write_bytes(each.read_bytes()[:-5])
    assert np.array_equal(task(file, learned).train.text, expected)
    file.write_bytes(WORDS.replace(b"naive", b"nave") + b"more")
    Tokenizer.learn(pieces(WORDS), 290).save(learned)
    assert len(task(file, learned).train.text) != len(expected)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_what_another_process_encodes_meanwhile_is_not_encoded_again(learned, tmp_path, monkeypatch):
    monkeypatch.setattr(subwords, "cache_dir", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(subwords, "KEPT_FROM", 100)
    tokenizer, made = Tokenizer.read(learned), tmp_path / "made.npy"
    expected = subwords.encoded(WORDS, tokenizer)
    (file,) = (tmp_path / "cache" / "tokens").iterdir()
    file.rename(made)
    monkeypatch.setattr(subwords, "_encode", None)  # nothing may be encoded from now on
    call = partial(subwords.encoded, WORDS, tokenizer)
    assert np.array_equal(made_by_another(monkeypatch, subwords, "_mapped", file, made, call), expected)


def test_what_cannot_be_kept_is_encoded_again(file, learned, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where a folder is to be")
    monkeypatch.setattr(subwords, "cache_dir", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(subwords, "KEPT_FROM", 100)
    assert len(task(file, learned).train.text)


def test_what_is_told_of_a_tokenizer(file, learned, tmp_path):
    assert text.Config(data=str(file), length=8).build().notices(tmp_path) == []
    (line,) = task(file, learned).notices(tmp_path)
    assert line.startswith("tokenizer: 300 tokens, ")
    lossy = tokenizers.Tokenizer.from_file(str(learned))
    lossy.normalizer = tokenizers.normalizers.Replace("naïve", "nice")
    lossy.save(str(tmp_path / "lossy.json"))
    assert "does not keep all of the text" in task(file, tmp_path / "lossy.json").notices(tmp_path)[1]


def test_bad_input(file, learned, tmp_path):
    with pytest.raises(
        DataError, match=r"tokens of .*t\.json are 300, and the model was made for 256: take the"
    ):
        task(file, learned).check(text.Config(data=str(file)).build().model(linear.Config()))
    with pytest.raises(Error, match=r"words\.txt is damaged"):
        _ = task(file, file).train
    file.write_bytes(WORDS + b"\xff")
    with pytest.raises(DataError, match=r"words\.txt is not in UTF-8: byte [\d,]+ is 255"):
        _ = task(file, learned).train
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"words\.txt is empty"):
        _ = task(file, learned).train
    file.write_bytes(b"a few words")
    with pytest.raises(
        DataError, match=r"holds \d+ tokens: .* Take 80 tokens or more, or a --length of at most"
    ):
        _ = task(file, learned).train


def test_texts_are_classified_by_tokens(tmp_path, learned):
    lines = "".join(f"{('no', 'yes')[i % 2]}\tnaïve words {i}, as before\n" for i in range(20))
    (tmp_path / "texts.tsv").write_text(lines)
    config = text_classification.Config(data=str(tmp_path / "texts.tsv"), tokenizer=str(learned), length=6)
    built = config.build()
    batch = built.train.__getitems__([0, 1])
    tokens = Tokenizer.read(learned).encode("naïve words 0, as before")
    assert len(tokens) > 6
    assert batch["tokens"][0].tolist() == tokens[:6]
    model = built.model(linear.Config())
    built.check(model)
    assert model.vocabulary == 300
    network = model.build().eval()
    found = built.probabilities(network, ["naïve words 0, as before".encode()])
    batch = built.train.__getitems__([0])
    assert torch.equal(found.argmax(-1), network(batch["tokens"], mask=batch["mask"]).argmax(-1))
    with pytest.raises(DataError, match="was made for 256"):
        built.check(text_classification.Config(data=config.data).build().model(linear.Config()))


def test_bits_per_byte_of_a_test_are_of_its_own_bytes(file, learned, tmp_path):
    (tmp_path / "new.txt").write_bytes("日本語".encode() * 30)
    built = task(file, learned, test=str(tmp_path / "new.txt"))
    model = built.model(linear.Config()).build().eval()
    found = built.per_sample(model, built.test.__getitems__([0, 1]))
    size = 270 / len(built.test.text)
    assert torch.allclose(found["bits_per_byte"] * size, found["bits_per_token"])
    assert size != pytest.approx(built._parts.bytes_per_symbol, rel=0.1)

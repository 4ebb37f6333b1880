"""Training from shards: every token once per epoch, documents that do not see each other, on any number of
processes; and shards that do not suit the settings."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lintra import attention, train
from lintra.attention import linear
from lintra.io.files import Error
from lintra.models import decoder
from lintra.tasks import DataError, predict, text
from lintra.tasks.datasets.documents import Document
from lintra.tasks.datasets.packed import Packed
from lintra.tasks.datasets.shard_writer import write_shards
from lintra.tokenizer import Tokenizer, pieces
from lintra.train.batches import StepSampler
from lintra.train.learner import Learner

WORDS = [f"{i}: {'naïve words ' * (i % 9)}".encode() for i in range(200)]


def written(folder, tokenizer=None, texts=WORDS, **settings):
    documents = [Document(each, f"line {i}") for i, each in enumerate(texts, 1)]
    write_shards(folder, documents, tokenizer, **({"held_out": 0.2, "shard_tokens": 900} | settings))
    return folder


@pytest.fixture
def shards(tmp_path):
    return written(tmp_path / "s")


@pytest.fixture
def learned(tmp_path):
    pytest.importorskip("tokenizers")
    Tokenizer.learn(pieces(b"\n".join(WORDS)), 300).save(tmp_path / "t.json")
    return tmp_path / "t.json"


def task(folder, **settings):
    return text.Config(data=str(folder), **({"length": 32} | settings)).build()


def counted_bytes(batch):
    real = batch.get("counted", torch.ones_like(batch["tokens"], dtype=torch.bool))
    return [bytes(row[own].tolist()) for row, own in zip(batch["tokens"], real, strict=True)]


def built(task, mechanism=None, **changes):
    """A model in float64, so that the order of sums does not matter."""
    torch.manual_seed(0)
    config = task.model(mechanism or linear.Config())
    small = {"layers": 2, "heads": 2, "width": 16, "dropout": 0.0}
    return dataclasses.replace(config, **(small | changes)).build().double().eval()


def test_every_token_is_in_one_sequence(shards):
    problem = task(shards)
    for samples in (problem.train, problem.validate):
        batch = samples.__getitems__(range(len(samples)))
        if samples is problem.validate:  # validation samples are evenly spread over the data
            places = torch.tensor([samples._stride * i % len(samples) for i in range(len(samples))])
            assert places.tolist() != sorted(places.tolist())
            batch = {name: x[places.argsort()] for name, x in batch.items()}
        tokens, documents = samples.line.read(0, len(samples.line))
        assert b"".join(counted_bytes(batch)) == bytes(tokens.tolist())
        real = batch.get("counted", batch["documents"] >= 0)
        assert np.array_equal(batch["documents"][real].numpy(), documents)
        with pytest.raises(IndexError):
            samples[len(samples)]


@pytest.mark.parametrize("n", [*range(1, 60), 1000, 10**6])
def test_validation_visits_every_sequence(n):
    samples = Packed([None] * n, 1, spread=True)
    assert len({samples._stride * i % n for i in range(min(n, 1000))}) == min(n, 1000)
    assert np.gcd(samples._stride, n) == 1


def test_a_validation_reads_all_parts_of_the_text(tmp_path):
    """No part that is longer than twice the distance of as many evenly spread samples is left out."""
    problem = task(written(tmp_path / "s", texts=[b"%04d" % i for i in range(8_030)]), length=8)
    learner = Learner(torch.nn.Identity(), problem, train.Config(steps=1, batch=1))
    learner.trainer = SimpleNamespace(world_size=1, global_rank=0)
    read = [
        problem.validate._stride * i % len(problem.validate)
        for (i,) in learner.val_dataloader().batch_sampler
    ]
    read = sorted([*read, read[0] + len(problem.validate)])
    assert len(problem.validate) > 10 * len(read) == 10 * 17
    assert np.diff(read).max() <= 2 * len(problem.validate) / 16


NAMES = [name for name in attention.names() if attention.mechanism(name).can.causal]


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_predicted_as_if_it_stood_alone(shards, name):
    """Each token is predicted from those before it in its document and sequence, with every mechanism."""
    problem = task(shards)
    mechanism = attention.for_length(attention.load(name).Config, problem.length)
    model = built(problem, mechanism)
    batch = problem.train.__getitems__([0, 7, len(problem.train) - 1])
    params, together = predict(model, batch)
    assert params.shape[:2] == together.shape == (3, 32)
    parts = 0
    for tokens, documents, found in zip(batch["tokens"], batch["documents"], together, strict=True):
        for number in documents.unique():
            own = documents == number
            alone = predict(model, {"tokens": tokens[own][None]})[1][0]
            torch.testing.assert_close(found[own], alone, rtol=1e-9, atol=1e-9)
            parts += 1
    assert parts > 3


def test_what_fills_up_the_last_sequence_counts_for_nothing(shards):
    problem = task(shards)
    model = built(problem)
    last = problem.train.__getitems__([len(problem.train) - 1])
    real = last["counted"][0]
    assert 0 < real.sum() < 32
    score = problem.score(model, last)
    alone = problem.score(model, {name: x[:, real] for name, x in last.items() if name != "counted"})
    assert score["weight"] == alone["weight"] == real.sum()
    torch.testing.assert_close(score["bits_per_byte"], alone["bits_per_byte"])
    last["tokens"][0, ~real] = 99
    torch.testing.assert_close(problem.score(model, last)["loss"], score["loss"])


def test_a_step_is_the_same_in_any_number_of_processes(shards):
    """Loss and gradients: the mean over all tokens that count, in the sequences that the processes share."""
    problem = task(shards, batch_tokens=8 * 32)
    assert problem.batch == 8
    model = built(problem)
    samples = problem.train
    whole = StepSampler(len(samples), 8, seed=1)
    step = next(
        i for i in range(len(samples)) if len(samples) - 1 in whole.of_step(i)
    )  # including the shorter one
    found = []
    for world in (1, 2, 4, 8):
        total, gradients, sequences = 0.0, None, []
        for rank in range(world):
            places = StepSampler(len(samples), 8, seed=1, rank=rank, world=world).of_step(step)
            batch = samples.__getitems__(places)
            sequences += counted_bytes(batch)
            model.zero_grad()
            loss = problem.loss(model, batch) * problem.weight(batch)
            loss.backward()
            own = torch.cat([x.grad.flatten() for x in model.parameters()])
            gradients = own if gradients is None else gradients + own
            total += loss.item()
        found.append((total, gradients, sequences))
    assert any(len(row) < 32 for row in found[0][2])
    for total, gradients, sequences in found[1:]:
        assert sequences == found[0][2]
        assert total == pytest.approx(found[0][0], rel=1e-12)
        torch.testing.assert_close(gradients, found[0][1], rtol=1e-9, atol=1e-9)


def run_of(folder, data, steps, **settings):
    problem = text.Config(data=str(data), length=32, batch_tokens=4 * 32)
    shape = {"layers": 1, "heads": 2, "width": 16}
    model = dataclasses.replace(problem.build().model(linear.Config()), **shape)
    config = train.Config(steps=steps, precision="32", validate_every=4, save_every=3, **settings)
    return train.Run.create(folder, task=problem, model=model, train=config)


@pytest.mark.usefixtures("one_thread")
def test_a_run_is_resumed_where_it_was(shards, tmp_path):
    from safetensors.torch import load_file

    whole, parts = run_of(tmp_path / "whole", shards, 8), run_of(tmp_path / "parts", shards, 3)
    train.fit(whole, verbosity="result")
    train.fit(parts, verbosity="result")
    train.fit(train.Run.read(parts.folder).changed(steps=8), verbosity="result")
    ends = [load_file(run.folder / "step-00000008" / "model.safetensors") for run in (whole, parts)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_run_keeps_the_tokenizer_of_the_shards(learned, tmp_path):
    data = written(tmp_path / "s", Tokenizer.read(learned))
    run = run_of(tmp_path / "run", data, 3)
    assert Path(run.task.tokenizer) == tmp_path / "run" / "tokenizer.json"
    shutil.rmtree(data)
    assert train.Run.read(run.folder).task.build().decode([40])


def test_bits_are_of_the_bytes_held_out(learned, tmp_path):
    """For a model that finds all tokens equally likely: the bits per token times the tokens per byte."""
    tokenizer = Tokenizer.read(learned)
    data = written(tmp_path / "s", tokenizer, end=0)
    problem = task(data)
    assert problem.vocabulary == 300
    model = built(problem)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    samples = problem.validate
    score = problem.score(model, samples.__getitems__(range(len(samples))))
    held_out = samples.line.shards
    tokens, size = sum(x.tokens for x in held_out), sum(x.bytes for x in held_out)
    assert score["weight"] == tokens == len(samples.line)
    assert score["bits_per_byte"].item() == pytest.approx(np.log2(300) * tokens / size, rel=1e-6)
    read, documents = samples.line.read(0, tokens)
    own = [read[documents == i].tolist() for i in range(samples.line.documents)]
    assert all(each[-1] == 0 for each in own)
    assert sum(len(tokenizer.decode(each[:-1]).encode()) for each in own) == size
    lines = problem.notices(tmp_path)
    assert "documents of" in lines[0]
    assert lines[1].startswith("tokenizer: 300 tokens, ")
    assert len(lines) == 2


def test_a_tokenizer_that_loses_text_is_told(learned, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    lossy = tokenizers.Tokenizer.from_file(str(learned))
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    lossy.save(str(tmp_path / "lossy.json"))
    texts = [each.upper() for each in WORDS]
    data = written(tmp_path / "s", Tokenizer.read(tmp_path / "lossy.json"), texts)
    assert "does not keep all of the text" in task(data).notices(tmp_path)[-1]


def test_a_text_that_cannot_be_encoded_is_named(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="none")
    tokenizers.Tokenizer(words).save(str(tmp_path / "t.json"))
    with pytest.raises(Error, match=r"^line 2: .*t\.json cannot encode this text"):
        written(tmp_path / "s", Tokenizer.read(tmp_path / "t.json"), [b"a", b"b"])


def test_shards_of_another_tokenizer_are_refused(learned, shards, tmp_path):
    data = written(tmp_path / "tokens", Tokenizer.read(learned))
    with pytest.raises(
        DataError, match=r"the shards in .*s are bytes, not tokens of .*: leave --tokenizer out, or prepare"
    ):
        _ = task(shards, tokenizer=str(learned)).train
    Tokenizer.learn(pieces(b"other words"), 270).save(tmp_path / "other.json")
    with pytest.raises(DataError, match=r"other\.json is not the tokenizer of the shards in .*tokens: leave"):
        _ = task(data, tokenizer=str(tmp_path / "other.json")).train
    task(data, tokenizer=str(learned)).check(task(data).model(linear.Config()))
    with pytest.raises(DataError, match="are 300, and the model was made for 256"):
        task(data).check(task(shards).model(linear.Config()))
    shutil.copy(tmp_path / "other.json", data / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json has \d+ tokens, and .*index\.json says 300: put"):
        _ = task(data).train
    (data / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"are tokens of .*tokenizer\.json, not bytes: prepare shards of"):
        _ = task(data).train


@pytest.fixture
def numbered(tmp_path):
    """Shards of 1,000 tokens without a tokenizer, as another program may write them."""
    folder, index = tmp_path / "n", {"format": 1, "vocabulary": 1_000, "dtype": "uint16", "tokenizer": None}
    folder.mkdir()
    for split, count in (("train", 50), ("validate", 5)):
        (np.arange(count * 7) * 331 % 1_000).astype("<u2").tofile(folder / f"{split}.tokens")
        (np.arange(1, count + 1) * 7).astype("<i8").tofile(folder / f"{split}.ends")
        index[split] = [{"name": split, "tokens": count * 7, "documents": count}]
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_tokens_without_a_tokenizer_are_numbers(numbered, tmp_path):
    problem = task(numbered)
    assert (problem.vocabulary, problem.unit) == (1_000, "tokens")
    model = built(problem)
    problem.check(model.config)
    score = problem.score(model, problem.validate.__getitems__([0, 1]))
    assert score.keys() == {"loss", "bits_per_token", "weight"}
    torch.testing.assert_close(score["bits_per_token"], score["loss"] / np.log(2))
    assert problem.to_tokens("0 331 999").tolist() == [[0, 331, 999]]
    assert problem.decode([0, 331, 999]) == "0 331 999"
    assert problem.notices(tmp_path)[0].endswith("documents of 350 tokens to learn from, 5 of 35 held out")
    run = run_of(tmp_path / "run", numbered, 3)
    shutil.rmtree(numbered)
    assert train.Run.read(run.folder).task.build().vocabulary == 1_000


@pytest.mark.parametrize("prompt", ["1 x", "1000", "-1", "²"])
def test_a_prompt_of_numbers_is_of_tokens(numbered, prompt):
    with pytest.raises(DataError, match="tokens must be numbers below 1,000, with spaces between, got"):
        task(numbered).to_tokens(prompt)


def test_a_vocabulary_is_that_of_the_shards(numbered, shards, learned, tmp_path):
    with pytest.raises(
        DataError, match=r"the shards in .*n are of 1,000 tokens, not 999: leave --vocabulary"
    ):
        _ = task(numbered, vocabulary=999).train
    with pytest.raises(
        DataError, match=r"n are tokens without a tokenizer, not tokens of .*: leave --tokenizer out"
    ):
        _ = task(numbered, tokenizer=str(learned)).train
    with pytest.raises(ValueError, match=r"vocabulary is that of .*t\.json: leave it out, got 300"):
        task(shards, tokenizer=str(learned), vocabulary=300)
    (tmp_path / "words.txt").write_text("some words " * 100)
    with pytest.raises(DataError, match=r"vocabulary is for shards of tokens, and .*words\.txt is text"):
        _ = task(tmp_path / "words.txt", vocabulary=300).train


def test_bits_per_byte_need_the_bytes(learned, tmp_path):
    data = written(tmp_path / "s", Tokenizer.read(learned))
    content = json.loads((data / "index.json").read_text())
    del content["validate"][0]["bytes"]
    (data / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"does not say of each shard in 'validate' how many bytes of text"):
        _ = task(data).train


def test_a_model_without_a_start_symbol_is_refused(shards):
    with pytest.raises(DataError, match=r"from the start symbol: build the decoder with start=True"):
        task(shards).check(decoder.Config(vocabulary=256, start=False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_tokens": 33}, "batch_tokens must be a multiple of length=32, got 33"),
        ({"batch_tokens": 16}, "batch_tokens must be a multiple of length=32, got 16"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        text.Config(length=32, **settings)


def test_fewer_sequences_than_devices_are_refused(shards):
    problem = task(shards, batch_tokens=64)
    with pytest.raises(
        ValueError, match=r"\(batch_tokens\) must be a multiple of devices=4, got 2 sequences"
    ):
        train.Config(devices=4).check_batch(problem.batch_tokens, problem.batch)
    train.Config(devices=2, batch=1).check_batch(problem.batch_tokens, problem.batch)


def test_a_text_may_be_tested_on_and_other_shards(shards, tmp_path):
    (tmp_path / "new.txt").write_bytes(b"some words " * 20)
    tested = text.Config(data=str(shards), length=32).with_data(str(tmp_path / "new.txt"))
    assert len(tested.build().test) == 6
    others = written(tmp_path / "others")
    again = tested.with_data(str(others))
    assert (again.data, again.test) == (str(others), None)
    with pytest.raises(DataError, match=r"gone\.txt does not exist"):  # before training begins
        _ = dataclasses.replace(tested, test="gone.txt").build().train


def test_an_index_may_leave_the_tokenizer_out(numbered):
    index = json.loads((numbered / "index.json").read_text())
    del index["tokenizer"]
    (numbered / "index.json").write_text(json.dumps(index))
    assert task(numbered).train.line.read(0, 3)[0].tolist() == [0, 331, 662]
    del index["dtype"]
    (numbered / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json is not an index of shards: dtype must be"):
        _ = task(numbered).train

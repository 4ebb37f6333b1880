"""Speech: what is held out, what a batch holds, what cannot be learned from, what is refused."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lintra import train
from lintra.attention import cosformer, linear, softmax
from lintra.audio import waveform
from lintra.audio.errors import SpeechError
from lintra.models import bilstm, ctc, encoder
from lintra.speech.corpus import prepare
from lintra.speech.decoding import greedy
from lintra.speech.manifest import Utterance
from lintra.speech.scoring import Edits
from lintra.tasks import DataError, speech
from lintra.tasks.datasets import speech_splits
from tests.tasks.speech import text_of, write_kaldi, write_manifest

TEXTS = [text_of(i) for i in range(24)]


@pytest.fixture
def task(tmp_path):
    """Features of 24 utterances, so that no audio is needed."""
    return speech.Config(kaldi=str(write_kaldi(tmp_path / "kaldi", TEXTS)), subsample=2).build()


def small(config, **changes):
    """A recogniser that runs in milliseconds."""
    own = {"layers": 1, "heads": 2, "width": 16, "inputs": 16, "dropout": 0.0} | changes
    known = {field.name for field in dataclasses.fields(config.encoder)}
    changed = {name: x for name, x in own.items() if name in known}
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **changed))


def utterances(speakers):
    return [Utterance(id=f"u{i}", speaker=speaker) for i, speaker in enumerate(speakers)]


@given(n=st.integers(10, 60))
def test_a_tenth_of_the_utterances_is_held_back(n):
    """If speakers are not known; always the same ones, and every utterance is in one of the two parts."""
    given = utterances([None] * n)
    train, held = speech_splits.hold_back(given)
    assert len(held) == n // 10
    assert sorted(x.id for x in (*train, *held)) == sorted(x.id for x in given)
    assert (train, held) == speech_splits.hold_back(given)


@given(speakers=st.lists(st.integers(0, 30), min_size=10, max_size=80))
def test_speakers_are_held_back_as_a_whole_where_there_are_enough(speakers):
    train, held = speech_splits.hold_back(utterances(map(str, speakers)))
    of = [{x.speaker for x in part} for part in (train, held)]
    if len(set(speakers)) >= speech_splits.ENOUGH_SPEAKERS:
        assert not of[0] & of[1]
        assert len(of[1]) == len(set(speakers)) // 10
    else:
        assert len(held) == len(speakers) // 10


def test_a_batch_is_what_was_said(task):
    """Padding is 0, and a sample is the same in every batch."""
    samples = task.train
    batch = samples.__getitems__(range(4))
    assert batch["x"].shape[:2] == batch["mask"].shape
    assert [int(n) for n in batch["mask"].sum(1)] == samples.lengths[:4]
    assert not batch["x"][~batch["mask"]].any()
    for i in range(4):
        one = samples[i]
        assert torch.equal(batch["x"][i][batch["mask"][i]], one["x"])
        target = batch["targets"][i]
        assert torch.equal(target[target > 0], one["targets"])
        place = samples.utterances.places[i]
        assert task.symbols.decode(one["targets"].tolist()) == samples.utterances.corpus.texts[place]
    assert task.length == ctc.steps(max(task.train.lengths + task.validate.lengths), 2)
    assert task.batch_tokens == 2_000
    assert dataclasses.replace(task.config, batch_frames=99).build().batch_tokens == 99


@pytest.mark.parametrize("kind", ["transformer", "bilstm"])
def test_the_loss_is_that_of_all_symbols(task, kind):
    """The sum over utterances, each as if alone, divided by the number of symbols; edits are unscaled."""
    task = dataclasses.replace(task.config, encoder=kind).build()
    torch.manual_seed(0)
    model = small(task.model(linear.Config())).build().double().eval()
    batch = task.train.__getitems__(range(5))
    batch["x"] = batch["x"].double()
    together = task.per_sample(model, batch)
    mean = (together["loss"].sum() / together["weight"].sum()).item()
    assert task.loss(model, batch).item() == pytest.approx(mean)
    assert task.weight(batch) == together["weight"].sum()
    for i in range(5):
        one = {name: x[None].double() if name == "x" else x[None] for name, x in task.train[i].items()}
        alone = task.per_sample(model, one)
        for name in together:
            torch.testing.assert_close(together[name][i], alone[name][0])
        found = greedy(model(one["x"], mask=one["mask"])[0][0])
        assert alone["symbol_errors"][0] == Edits.between(one["targets"][0].tolist(), found).total
    task.loss(model, batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_frames_are_masked_in_training_only(task):
    """By the global seed, like dropout; training sets it at each step."""
    model = small(task.model(linear.Config())).build()
    batch = task.train.__getitems__(range(5))
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(task.loss(model, batch).item())
    assert losses[0] == losses[1] != losses[2]
    model.eval()
    expected = task.loss(model, batch).item()
    model.train()  # its dropout is 0
    for changes in ({"unmasked": True}, {"preset": "paper"}):
        plain = dataclasses.replace(task.config, **changes).build()
        assert plain.loss(model, batch).item() == expected


def test_what_cannot_be_learned_from_is_counted(tmp_path):
    """Too few frames for the symbols or their repeats, or no transcript; each with its reason, and never with
    an infinite loss."""
    folder = write_kaldi(tmp_path / "kaldi", [*TEXTS, "", "ABCA", "AAAA"])
    for i, frames in ((25, 6), (26, 12)):  # 4 symbols do not fit into 3 steps, nor one symbol 4 times into 6
        np.save(folder / f"{i}.npy", np.zeros((frames, 5), np.float32))
    task = speech.Config(kaldi=str(folder), subsample=2).build()
    skipped = {x.id: x.reason for part in (task.train, task.validate) for x in part.utterances.skipped}
    assert skipped == {
        "u24": "it has no transcript",
        "u25": "3 frames after subsampling are too few for its 4 symbols: it needs 4",
        "u26": "6 frames after subsampling are too few for its 4 symbols: it needs 7",
    }
    assert len(task.train) + len(task.validate) == 24
    model = small(task.model(linear.Config())).build()
    assert task.per_sample(model, task.train.__getitems__(range(len(task.train))))["loss"].isfinite().all()
    told = {remark.split(":")[0]: remark for remark in task.notices(tmp_path)}
    for split, samples in (("train", task.train), ("validate", task.validate)):
        file, own = tmp_path / f"skipped-{split}.jsonl", samples.utterances.skipped
        assert (split in told) == file.exists() == bool(own)
        if own:
            assert [json.loads(line) for line in file.read_text().splitlines()] == [x._asdict() for x in own]
            assert f"{len(own)} skipped: {own[0].id}: {own[0].reason}" in told[split]
            assert told[split].endswith(f"; all of them in {file}")
    assert told
    speech.Config(kaldi=str(write_kaldi(folder, TEXTS))).build().notices(tmp_path)
    assert not list(tmp_path.glob("skipped-*"))


def test_utterances_that_all_cannot_be_used(tmp_path):
    folder = write_kaldi(tmp_path / "kaldi", TEXTS)
    for i in range(len(TEXTS)):
        np.save(folder / f"{i}.npy", np.zeros((1, 5), np.float32))
    task = speech.Config(kaldi=str(folder)).build()
    with pytest.raises(
        DataError, match=r"no utterance to train on can be used: 22 skipped: u\d+: .*; \.\.\."
    ):
        _ = task.train


def test_a_test_set_with_symbols_that_were_not_learned(tmp_path):
    folder = write_kaldi(tmp_path / "kaldi", TEXTS)
    other = write_kaldi(tmp_path / "other", ["AB", "AD", "BB"])
    task = speech.Config(kaldi=str(folder), test=str(other)).build()
    assert len(task.test) == 2
    assert [(x.id, "'D'" in x.reason) for x in task.test.utterances.skipped] == [("u1", True)]
    assert [x.id for x in task.tested] == ["u0", "u1", "u2"]
    assert speech.Config(kaldi=str(folder)).build().test.utterances.places == task.validate.utterances.places
    moved = dataclasses.replace(task.config, test=None).with_data(str(other))
    assert moved == task.config


def test_data_to_test_on_are_of_either_form(tmp_path):
    """Chosen by what the path holds, whatever the task learned from; else it is the folder of a corpus."""
    kaldi = write_kaldi(tmp_path / "kaldi", ["AB", "AD"])
    manifest = write_manifest(tmp_path / "list", ["AB", "AC", "B"])
    for config in (
        speech.Config(kaldi="elsewhere", test=str(manifest)),
        speech.Config(manifest="elsewhere.jsonl"),
        speech.Config(data="fsdd", data_dir="x"),
    ):
        assert [x.text for x in config.with_data(str(kaldi)).build().tested] == ["AB", "AD"]
        task = config.with_data(str(manifest)).build()
        assert [x.text for x in task.tested] == ["AB", "AC", "B"]
        assert task.judged_by == "test"
    assert config.with_data(str(tmp_path)) == dataclasses.replace(config, data_dir=str(tmp_path))
    own = speech.Config(manifest=str(manifest))  # it holds a part out, which is scored
    assert own.with_data(str(manifest)) == own
    assert dataclasses.replace(own, test="other.jsonl").with_data(str(manifest)) == own
    with pytest.raises(SpeechError, match="list is not a Kaldi folder"):
        _ = speech.Config(kaldi=str(kaldi)).with_data(str(tmp_path / "list")).build().tested


def test_statistics_of_the_training_data(task):
    task = dataclasses.replace(task.config, normalize="global").build()
    model = small(task.model(linear.Config())).build()
    task.prepare(model)
    frames = task.train.utterances.corpus.features
    # In float32; the sums are in float64.
    torch.testing.assert_close(model.mean, torch.from_numpy(frames.mean(0)), rtol=1e-4, atol=1e-5)
    plain = dataclasses.replace(task.config, normalize=None).build()
    plain.prepare(small(plain.model(linear.Config())).build())  # it has nothing to set


def test_phonemes_of_a_lexicon(tmp_path):
    folder = write_kaldi(tmp_path / "kaldi", [f"{'AB'[i % 2]} B" for i in range(19)] + ["A C"])
    (tmp_path / "lexicon.txt").write_text("A ah\nB b iy\n")
    config = speech.Config(kaldi=str(folder), units="phoneme", lexicon=str(tmp_path / "lexicon.txt"))
    task = config.build()
    assert task.symbols.names == ("ah", "b", "iy")
    skipped = [*task.train.utterances.skipped, *task.validate.utterances.skipped]
    assert [(x.id, "'C'" in x.reason) for x in skipped] == [("u19", True)]
    assert task.symbols.decode(task.train[0]["targets"].tolist()) in ("ah b iy", "b iy b iy")


def test_models(task):
    """The presets, and how flags change them."""
    made = task.model(cosformer.Config(max_length=99))
    assert made.encoder.position == "sinusoidal"  # the mechanism has its own positions
    made = task.model(softmax.Config())
    assert isinstance(made.encoder, encoder.Config)
    assert made.encoder.position == "rotary"
    assert (made.normalize, made.subsample, made.features.bins) == ("utterance", 2, 5)
    assert made.features.kind == "given"
    paper = dataclasses.replace(task.config, preset="paper", subsample=None, streaming=True).build()
    made = paper.model(linear.Config())
    assert (made.encoder.layers, made.encoder.heads, made.encoder.inputs) == (9, 6, 5)
    assert made.encoder.position == "sinusoidal"
    assert (made.normalize, made.encoder.causal) == ("global", True)
    lstm = dataclasses.replace(task.config, preset="paper", encoder="bilstm").build()
    made = lstm.model(linear.Config())
    assert isinstance(made.encoder, bilstm.Config)
    assert (made.encoder.layers, made.encoder.width) == (3, 320)
    with pytest.raises(ValueError, match="attention is for encoder='transformer', a Bi-LSTM has none"):
        lstm.model(softmax.Config())
    assert paper.config.training_preset()["schedule"] == "plateau"
    assert lstm.config.training_preset()["lr"] == 1e-3


def test_audio(tmp_path):
    """A manifest of wave files, at three speeds, with cached features."""
    manifest = write_manifest(tmp_path / "audio", TEXTS[:12])
    config = speech.Config(
        manifest=str(manifest), rate=8_000, bins=20, speeds=(0.9, 1.0, 1.1), cache=str(tmp_path / "kept")
    )
    task = config.build()
    assert len(task.train) == 3 * 11
    assert len(task.validate) == 1
    assert sorted(x.name for x in (tmp_path / "kept").iterdir()) == [
        "train.safetensors",
        "validate.safetensors",
    ]
    assert (task.features.rate, task.features.bins) == (8_000, 20)
    again = config.build()
    assert np.array_equal(again.train.utterances.corpus.features, task.train.utterances.corpus.features)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "an4", "manifest": "x"}, "only one of data, manifest and kaldi can be given, got data and"),
        ({"data": "wsj"}, "data must be 'an4' or 'fsdd' or None, got 'wsj'"),
        ({"data": "an4", "test": "x"}, "test goes with manifest or kaldi: an4 has a test set of its own"),
        ({"units": "phoneme"}, "lexicon goes with units='phoneme', got None"),
        ({"lexicon": "x"}, "lexicon goes with units='phoneme', got x with 'character'"),
        ({"streaming": True, "encoder": "bilstm"}, "streaming needs a transformer"),
        (
            {"streaming": True, "normalize": "utterance"},
            "streaming needs a transformer and normalize='global'",
        ),
        ({"subsample": 3}, "subsample must be 1, 2 or 4 frames, got 3"),
        ({"shift_ms": 0.0}, "shift_ms must be between 0.1 and 1000 milliseconds, got 0.0"),
        ({"batch_frames": 0}, "batch_frames must be at least 1, got 0"),
        ({"speeds": (0.9, 1.1)}, "speeds must lie in 0.5 .. 2 and hold 1"),
        ({"speeds": (1.0, 3.0)}, "speeds must lie in 0.5 .. 2 and hold 1"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        speech.Config(**settings)


@pytest.mark.parametrize("named", [None, ""])
def test_speech_that_is_not_there(tmp_path, monkeypatch, named):
    """An empty $LINTRA_DATA names no folder."""
    monkeypatch.delenv("LINTRA_DATA", raising=False)
    if named is not None:
        monkeypatch.setenv("LINTRA_DATA", named)
    for config, message in (
        (speech.Config(), "which speech[?] Name a corpus with --data an4 or fsdd"),
        (
            speech.Config(data="an4"),
            r"files of an4 are not known: name their folder in \$LINTRA_DATA, or with",
        ),
    ):
        with pytest.raises(DataError, match=message):
            _ = config.build().train
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    for place, message in (
        ("other", "other holds neither the corpus fsdd, which is fsdd_index.csv and fsdd.tar.xz, nor a data"),
        ("nowhere", "nowhere, for the files of fsdd, does not exist: name their folder"),
        ("file", "file, for the files of fsdd, is not a folder: name their folder"),
    ):
        with pytest.raises(DataError, match=message):
            _ = speech.Config(data="fsdd", data_dir=str(tmp_path / place)).build().train
    (tmp_path / "other" / "fsdd.tar.xz").touch()
    with pytest.raises(DataError, match=r"other has only a part of .*: fsdd_index\.csv missing"):
        _ = speech.Config(data="fsdd", data_dir=str(tmp_path / "other")).build().train
    folder = write_kaldi(tmp_path / "few", TEXTS[:9])
    with pytest.raises(DataError, match="there are 9 utterances to learn from: take 10 or more"):
        _ = speech.Config(kaldi=str(folder)).build().train


@pytest.mark.parametrize("damage", ["missing", "text", "numbers", "flat", "empty"])
def test_features_that_cannot_be_used_do_not_end_the_others(tmp_path, damage):
    """Not even the first file, which determines the width; only if all are bad does the task end."""
    folder = write_kaldi(tmp_path / "kaldi", TEXTS)
    first, *others = (x.id for x in speech.Config(kaldi=str(folder)).build().utterances["train"])

    def spoil(id):
        file = folder / f"{id[1:]}.npy"
        if damage in ("missing", "text"):
            file.unlink() if damage == "missing" else file.write_text("no array")
        else:
            shape, dtype = {"numbers": ((9, 7), int), "flat": (9, float), "empty": ((0, 7), float)}[damage]
            np.save(file, np.zeros(shape, dtype))

    spoil(first)
    task = speech.Config(kaldi=str(folder), subsample=2).build()
    assert task.features.bins == 5
    assert [x.id for x in task.train.utterances.skipped] == [first]
    assert len(task.train) == len(others)
    for id in others:
        spoil(id)
    with pytest.raises(DataError, match=f"features of none of 22 utterances can be used; the first, {first}"):
        _ = speech.Config(kaldi=str(folder)).build().train


@pytest.mark.parametrize("name", ["manifest", "an4"])
def test_a_corpus_is_read_once(tmp_path, monkeypatch, name):
    """Whatever is asked of it."""
    read, reads = [Utterance(id=f"u{i}", text="AB", features=np.ones((20, 5))) for i in range(20)], []
    monkeypatch.setattr(speech_splits, "read_manifest", lambda path: reads.append(path) or read)
    corpora = {"an4": (lambda path: reads.append(path) or {"train": read, "test": read}, ["index"])}
    (tmp_path / "index").touch()
    monkeypatch.setattr(speech_splits, "_CORPORA", corpora)
    settings = {"manifest": {"manifest": "x"}, "an4": {"data": "an4", "data_dir": str(tmp_path)}}[name]
    task = speech.Config(**settings).build()
    assert [len(x) for x in (task.tested, task.train, task.validate)] == [20 if name == "an4" else 2, 18, 2]
    assert len(task.test) == len(task.tested)
    assert len(reads) == 1


def test_how_far_the_features_are_is_shown(task):
    """Once for each split, utterance by utterance."""
    seen = {}

    def watch(what, total, unit):
        return contextlib.nullcontext(seen.setdefault((what, total, unit), []).append)

    task.watch = watch
    _ = task.train, task.validate, task.test, task.length
    assert seen == {
        ("features to train on", 22, "utterances"): list(range(1, 23)),
        ("features to validate on", 2, "utterances"): [1, 2],
    }


def both(folder):
    """A Kaldi folder with features and audio, 10 utterances."""
    manifest = write_manifest(folder, TEXTS[:10])
    write_kaldi(folder, TEXTS[:10])
    (folder / "wav.scp").write_text("".join(f"u{i} {manifest.name}-{i}.wav\n" for i in range(10)))
    return folder


def test_features_go_before_audio_in_training(tmp_path):
    """If a folder has both; a trained model reads what it was trained on."""
    task = speech.Config(kaldi=str(both(tmp_path / "both"))).build()
    assert (task.features.kind, task.features.bins) == ("given", 5)
    (tmp_path / "both" / "feats.scp").rename(tmp_path / "feats.scp")
    alone = speech.Config(kaldi=str(tmp_path / "both"), rate=8_000).build()
    assert alone.features.kind == "fbank"
    for kind, bins in ((task.features, 5), (alone.features, 40)):
        corpus, skipped = prepare(task.tested, kind, cache=None)
        assert corpus.features.shape[1] == bins
        assert not skipped


@pytest.mark.parametrize("shift", [None, 12.5, 40.0, 11.6])
def test_the_time_between_frames_that_are_given(task, shift):
    """In milliseconds, not rounded to samples; 10 unless given."""
    task = dataclasses.replace(task.config, shift_ms=shift).build()
    assert task.model(linear.Config()).seconds == pytest.approx(2 * (shift or 10.0) / 1_000)
    assert task.features.kind == "given"


def test_audio_has_a_time_between_frames_of_its_own(tmp_path):
    manifest = write_manifest(tmp_path, TEXTS[:10])
    with pytest.raises(DataError, match="shift_ms is for features that are given, and this is audio: leave"):
        _ = speech.Config(manifest=str(manifest), shift_ms=10.0).build().features


def of_recordings(folder, **settings):
    return speech.Config(
        manifest=str(write_manifest(folder, TEXTS)), rate=8_000, bins=8, subsample=2, **settings
    )


def test_on_the_fly_a_batch_is_what_it_is_else(tmp_path):
    """Only the lengths of recordings are read beforehand."""
    kept = of_recordings(tmp_path, normalize="global", speeds=(1.0, 1.1)).build()
    task = dataclasses.replace(kept.config, on_the_fly=True).build()
    for split in ("train", "validate"):
        samples, wanted = getattr(task, split), getattr(kept, split)
        assert samples.lengths == wanted.lengths
        batch, other = (x.__getitems__(range(len(wanted))) for x in (samples, wanted))
        assert all(torch.equal(batch[name], other[name]) for name in other)
        assert not hasattr(samples.utterances.corpus, "features")
    assert (task.length, task.symbols, task.features) == (kept.length, kept.symbols, kept.features)
    models = [small(x.model(linear.Config())).build() for x in (kept, task)]
    for each, model in zip((kept, task), models, strict=True):
        each.prepare(model)
    torch.testing.assert_close(models[0].mean, models[1].mean)
    torch.testing.assert_close(models[0].scale, models[1].scale)


def test_on_the_fly_nothing_is_decoded_before_it_is_heard(tmp_path, monkeypatch):
    task = of_recordings(tmp_path, on_the_fly=True).build()
    with monkeypatch.context() as patch:
        patch.setattr(waveform, "_read", None)
        assert len(task.train) == 22
        assert task.length > 1
    assert task.train[0]["x"].shape[0] == task.train.lengths[0]


def trained(folder, task):
    model = small(task.build().model(linear.Config()))
    settings = train.Config(steps=4, precision="32", validate_every=4, seed=1)
    run = train.Run.create(folder, task=task, model=model, train=settings)
    train.fit(run, verbosity="result")
    return load_file(folder / "step-00000004" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_processes_that_read_ahead_change_nothing(tmp_path):
    config = of_recordings(tmp_path, batch_frames=200)
    on_the_fly = dataclasses.replace(config, on_the_fly=True)
    ahead = dataclasses.replace(on_the_fly, workers=1)
    found = [trained(tmp_path / f"run{i}", each) for i, each in enumerate((config, on_the_fly, ahead))]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"on_the_fly": True, "cache": "x"},
            "cache keeps features, on_the_fly keeps none: choose one, got cache=x",
        ),
        ({"workers": 2}, "workers=2 compute features ahead: they go with on_the_fly"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
    ],
)
def test_on_the_fly_or_kept(settings, message):
    with pytest.raises(ValueError, match=message):
        speech.Config(**settings)

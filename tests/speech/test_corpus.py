"""A corpus: the features of each utterance, what is skipped, and the file that stores them."""

import json
import os
import pickle
import time
import tracemalloc
from functools import partial

import numpy as np
import pytest
import soundfile
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lintra.audio import features, waveform
from lintra.audio.errors import SpeechError
from lintra.audio.waveform import Audio
from lintra.io import files
from lintra.speech import cache, corpus
from lintra.speech.computed_corpus import computed
from lintra.speech.corpus import Skipped, prepare
from lintra.speech.manifest import Utterance
from tests.io.turns import made_by_another

CONFIG = features.Config(rate=8_000, bins=8)
GIVEN = features.Config(kind="given", bins=3)


def noise(samples, seed=0):
    return np.random.default_rng(seed).normal(scale=0.1, size=samples).astype(np.float32)


@pytest.fixture
def utterances(tmp_path):
    """Two recordings, a section of one, and audio in memory; and three that cannot be used."""
    for name, rate, seed in (("a.wav", 8_000, 0), ("b.wav", 16_000, 1)):
        soundfile.write(tmp_path / name, noise(rate, seed), rate)
    (tmp_path / "text.wav").write_text("no audio")
    a, b = tmp_path / "a.wav", tmp_path / "b.wav"
    return [
        Utterance(id="a", text="ONE", audio=a, speaker="ann"),
        Utterance(id="none", text="X", audio=tmp_path / "none.wav"),
        Utterance(id="b", text=None, audio=b),
        Utterance(id="part", text="TWO", audio=a, start=0.25, duration=0.5, speaker="ann"),
        Utterance(id="short", text="X", audio=a, duration=0.02),
        Utterance(id="memory", text="", audio=Audio(noise(3_000, 2), 8_000)),
        Utterance(id="text", text="X", audio=tmp_path / "text.wav"),
        Utterance(id="late", text="X", audio=a, start=1.5),
        Utterance(id="silent", text="X"),
        Utterance(id="nul", text="X", audio=tmp_path / "a\0.wav"),
    ]


def same(one, other):
    """Assert that two corpora hold the same."""
    assert (one.ids, one.texts, one.speakers) == (other.ids, other.texts, other.speakers)
    np.testing.assert_array_equal(one.features, other.features, strict=True)
    np.testing.assert_array_equal(one.offsets, other.offsets)


def test_each_utterance_has_its_features(utterances):
    found, skipped = prepare(utterances, CONFIG, cache=None)
    assert found.ids == ["a", "b", "part", "memory"]
    assert found.texts == ["ONE", None, "TWO", ""]
    assert found.speakers == ["ann", None, "ann", None]
    assert len(found) == 4
    by_id = {x.id: x for x in utterances}
    for i, id in enumerate(found.ids):
        own = by_id[id]
        samples = waveform.read(own.audio, 8_000, start=own.start, duration=own.duration)
        np.testing.assert_array_equal(found.array(i), features.compute(samples, CONFIG))
        assert found.frames(i) == len(found.array(i)) == CONFIG.frames(len(samples))
    assert found.features.dtype == np.float32
    assert len(found.features) == found.offsets[-1]
    assert [x.id for x in skipped] == ["none", "short", "text", "late", "silent", "nul"]


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("none", "none.wav does not exist"),
        ("short", "0.02 seconds are too short for a frame of 25 ms"),
        ("text", "text.wav cannot be read as audio"),
        ("late", "a.wav ends after 1 seconds"),
        ("silent", "there is no audio"),
        ("nul", "does not exist"),
    ],
)
def test_what_is_skipped_says_why(utterances, id, reason):
    assert reason in {x.id: x.reason for x in prepare(utterances, CONFIG, cache=None)[1]}[id]


def test_speeds(utterances):
    plain, _ = prepare(utterances, CONFIG, cache=None)
    found, skipped = prepare(utterances, CONFIG, cache=None, speeds=(0.9, 1.0, 1.1))
    assert found.ids[:4] == ["a@0.9", "a", "a@1.1", "b@0.9"]
    assert found.texts[:4] == ["ONE", "ONE", "ONE", None]
    for i in range(len(plain)):
        np.testing.assert_array_equal(found.array(3 * i + 1), plain.array(i))
        slow, fast = found.frames(3 * i), found.frames(3 * i + 2)
        # One frame more or less, and the part of a frame by which its length exceeds its shift.
        assert slow == pytest.approx(plain.frames(i) / 0.9, abs=2)
        assert fast == pytest.approx(plain.frames(i) / 1.1, abs=2)
    assert len(skipped) == 6


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.1)])
def test_a_cache_holds_the_same(utterances, tmp_path, speeds, monkeypatch):
    path = tmp_path / "new folder" / "train.safetensors"
    wanted = prepare(utterances, CONFIG, cache=None, speeds=speeds)
    first = prepare(utterances, CONFIG, cache=path, speeds=speeds)
    assert [x.name for x in path.parent.iterdir()] == ["train.safetensors"]
    monkeypatch.setattr(corpus, "arrays", None)  # nothing may be computed from now on
    for found in (first, prepare(utterances, CONFIG, cache=path, speeds=speeds)):
        same(found[0], wanted[0])
        assert found[1] == wanted[1]


def test_a_cache_is_a_safetensors_file(utterances, tmp_path):
    path = tmp_path / "train.safetensors"
    found, _ = prepare(utterances, CONFIG, cache=path)
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["features"], found.features)
    np.testing.assert_array_equal(tensors["lengths"], np.diff(found.offsets))
    with safe_open(path, framework="np") as file:
        assert json.loads(file.metadata()["features"])["bins"] == 8


def test_texts_are_not_in_a_cache(utterances, tmp_path, monkeypatch):
    path = tmp_path / "train.safetensors"
    prepare(utterances, CONFIG, cache=path)
    monkeypatch.setattr(corpus, "arrays", None)
    renamed = [Utterance(**{**vars(x), "id": f"new {x.id}", "text": "NEW"}) for x in utterances]
    found, skipped = prepare(renamed, CONFIG, cache=path)
    assert found.ids == ["new a", "new b", "new part", "new memory"]
    assert set(found.texts) == {"NEW"}
    assert skipped[0].id == "new none"


def other_audio(utterances):
    soundfile.write(utterances[0].audio, noise(9_000, 7), 8_000)
    return utterances


def other_time(utterances):
    os.utime(utterances[0].audio, ns=(1, 1))
    return utterances


def other_section(utterances):
    return [Utterance(**{**vars(x), "duration": 0.4 if x.id == "part" else x.duration}) for x in utterances]


def other_memory(utterances):
    samples = Audio(noise(3_000, 3), 8_000)
    return [Utterance(**{**vars(x), "audio": samples if x.id == "memory" else x.audio}) for x in utterances]


def other_order(utterances):
    return utterances[::-1]


def one_that_was_missing(utterances):
    soundfile.write(utterances[1].audio, noise(8_000, 7), 8_000)
    return utterances


@pytest.mark.parametrize(
    "change", [other_audio, other_time, other_section, other_memory, other_order, one_that_was_missing]
)
def test_what_has_changed_is_computed_anew(utterances, tmp_path, change):
    path = tmp_path / "train.safetensors"
    prepare(utterances, CONFIG, cache=path)
    os.utime(path, ns=(1, 1))
    changed = change(utterances)
    found = prepare(changed, CONFIG, cache=path)
    assert path.stat().st_mtime_ns != 1
    wanted = prepare(changed, CONFIG, cache=None)
    same(found[0], wanted[0])
    assert found[1] == wanted[1]


def test_many_speeds_find_room_in_a_cache(tmp_path):
    speeds, path = [1 + i / 1_000 for i in range(500)], tmp_path / "train.safetensors"
    one = [Utterance(id="a", audio=Audio(noise(400), 8_000))]
    found, _ = prepare(one, CONFIG, cache=path, speeds=speeds)
    same(found, prepare(one, CONFIG, cache=None, speeds=speeds)[0])


@pytest.mark.parametrize("settings", [{"bins": 9}, {"shift_ms": 12.0}, {"dither": 1.0}])
def test_other_settings_are_computed_anew(utterances, tmp_path, settings):
    path = tmp_path / "train.safetensors"
    prepare(utterances, CONFIG, cache=path)
    config = features.Config(**{**vars(CONFIG), **settings})
    same(prepare(utterances, config, cache=path)[0], prepare(utterances, config, cache=None)[0])
    found, _ = prepare(utterances, config, cache=path, speeds=(1.0, 0.9))
    same(found, prepare(utterances, config, cache=None, speeds=(1.0, 0.9))[0])


def rewritten(**changes):
    """Write a cache again with other tensors; None removes one."""

    def change(path):
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        tensors = {**load_file(path), **changes}
        save_file({name: x for name, x in tensors.items() if x is not None}, path, metadata)

    return change


def as_json(x):
    return np.frombuffer(json.dumps(x).encode(), np.uint8)


def not_a_number(path):
    x = load_file(path)["features"]
    x[-1, -1] = np.nan
    rewritten(features=x)(path)


def wider_numbers(path):
    rewritten(features=load_file(path)["features"].astype(np.float64))(path)


def one_length_more(path):
    first, *others = load_file(path)["lengths"].tolist()
    rewritten(lengths=np.array([first - 1, 1, *others], np.int32))(path)


def a_length_below_zero(path):
    rewritten(lengths=np.array([-1, 1, 0, len(load_file(path)["features"])], np.int32))(path)


DAMAGE = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "pickled": lambda path: path.write_bytes(pickle.dumps({"features": 1})),
    "not a number": not_a_number,
    "no features": rewritten(features=None),
    "wide features": rewritten(features=np.zeros((10, 9), np.float32)),
    "fewer features": rewritten(features=np.zeros((10, 8), np.float32)),
    "wider numbers": wider_numbers,
    "one length more": one_length_more,
    "a length below zero": a_length_below_zero,
    "kept and skipped": rewritten(kept=np.array([0, 1, 2, 3], np.int32)),
    "kept twice": rewritten(kept=np.array([0, 0, 3, 5], np.int32)),
    "skipped is not JSON": rewritten(skipped=np.array([1, 2], np.uint8)),
    "skipped is no list": rewritten(skipped=as_json(3)),
    "skipped is too deep": rewritten(skipped=np.full(100_000, ord("["), np.uint8)),
    "skipped are names": rewritten(skipped=as_json([["a", ""], [4, ""]])),
    "skipped without a reason": rewritten(
        skipped=as_json([[1, 0], [4, ""], [6, ""], [7, ""], [8, ""], [9, ""]])
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_made_anew(utterances, tmp_path, damage):
    path = tmp_path / "train.safetensors"
    prepare(utterances, CONFIG, cache=path)
    damage(path)
    wanted, skipped = prepare(utterances, CONFIG, cache=None)
    found = prepare(utterances, CONFIG, cache=path)
    same(found[0], wanted)
    assert found[1] == skipped


def test_a_file_that_is_no_cache_is_kept(utterances, tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file({"weight": np.ones(3, np.float32)}, path)
    before = path.read_bytes()
    with pytest.raises(SpeechError, match=r"mine\.safetensors holds other tensors than a cache"):
        prepare(utterances, CONFIG, cache=path)
    assert path.read_bytes() == before


def test_another_format_is_made_anew(utterances, tmp_path, monkeypatch):
    path = tmp_path / "train.safetensors"
    monkeypatch.setattr(cache, "FORMAT", "0")
    prepare(utterances, CONFIG, cache=path)
    monkeypatch.undo()
    found, _ = prepare(utterances, CONFIG, cache=path)
    with safe_open(path, framework="np") as file:
        assert file.metadata()["format"] == cache.FORMAT
    same(found, prepare(utterances, CONFIG, cache=None)[0])


def test_memory_holds_one_utterance_when_a_cache_is_written(tmp_path):
    """In memory, the features would take several times as much."""
    many = [Utterance(id=str(i), features=tmp_path / f"{i}.npy") for i in range(40)]
    for i, utterance in enumerate(many):
        np.save(utterance.features, np.full((5_000, 3), i, np.float32))
    tracemalloc.start()
    found, _ = prepare(many, GIVEN, cache=tmp_path / "train.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.features.nbytes == 40 * 60_000
    assert peak < found.features.nbytes / 2
    assert [found.array(i)[0, 0] for i in range(40)] == list(range(40))


def test_a_cache_that_is_interrupted_leaves_what_was_there(utterances, tmp_path, monkeypatch):
    path = tmp_path / "caches" / "train.safetensors"
    prepare(utterances, CONFIG, cache=path)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(utterances[:3], CONFIG, cache=path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_what_another_process_computes_meanwhile_is_not_computed_again(utterances, tmp_path, monkeypatch):
    """As where the ranks of a training begin together."""
    path, made = tmp_path / "train.safetensors", tmp_path / "made.safetensors"
    prepare(utterances, CONFIG, cache=made)
    monkeypatch.setattr(corpus, "arrays", None)  # nothing may be computed from now on
    call = partial(prepare, utterances, CONFIG, cache=path)
    assert made_by_another(monkeypatch, corpus, "reopen", path, made, call) is not None


def test_what_killed_preparations_left_is_removed(utterances, tmp_path):
    """After a day: a newer one may still be at work."""
    path = tmp_path / "train.safetensors"
    # Hours since the folder was made, and since something was written into it.
    works = {
        ".train.safetensors.a": (25, 25),
        ".train.safetensors.b": (23, 23),
        ".train.safetensors.c": (25, 0),
    }
    works[".test.safetensors.d"] = (25, 25)  # that of another cache
    for name, ages in works.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / path.name).write_text("half")
        for each, hours in zip((tmp_path / name, tmp_path / name / path.name), ages, strict=True):
            os.utime(each, times=(time.time() - 3_600 * hours,) * 2)
    prepare(utterances, CONFIG, cache=path)
    assert {x.name for x in tmp_path.glob(".*")} == works.keys() - {".train.safetensors.a"}


def test_where_no_cache_can_be(utterances, tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    for path in (tmp_path / "a.wav", tmp_path / "folder.safetensors", tmp_path):
        with pytest.raises(ValueError, match=r"cache must be a file named \*\.safetensors, got"):
            prepare(utterances, CONFIG, cache=path)
    with pytest.raises(files.Error, match="cannot be written"):
        prepare(utterances, CONFIG, cache=tmp_path / "a.wav" / "train.safetensors")


GOOD = np.arange(12, dtype=np.float64).reshape(4, 3)


@pytest.fixture
def given_files(tmp_path):
    np.save(tmp_path / "good.npy", GOOD)
    np.savez(tmp_path / "good.npz", any=GOOD.astype(np.float16))
    np.savez(tmp_path / "two.npz", a=GOOD, b=GOOD)
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}, None]), allow_pickle=True)
    np.savez(tmp_path / "pickled.npz", np.array([{"a": 1}, None]))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "good.npy").read_bytes()[:-1])
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-50])
    (tmp_path / "text.npy").write_text("not numbers")
    (tmp_path / "empty.npz").write_bytes(b"")
    return tmp_path


def test_features_that_are_given(given_files):
    sources = [GOOD, GOOD.astype(np.float16), given_files / "good.npy", given_files / "good.npz"]
    found, skipped = prepare(
        [Utterance(id=str(i), features=x) for i, x in enumerate(sources)], GIVEN, cache=None
    )
    assert not skipped
    for i in range(4):
        np.testing.assert_array_equal(found.array(i), GOOD)
    assert found.features.dtype == np.float32


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "there are no features, and none can be computed"),
        (GOOD[0], r"features must be floats [t 3], got float64 [3]"),
        (GOOD.T, "features must be floats [t 3], got float64 [3, 4]"),
        (GOOD.astype(int), "features must be floats [t 3], got int64 [4, 3]"),
        (GOOD[:0], "features have no frames"),
        (np.where(GOOD == 7, np.nan, GOOD), "features have numbers that are not finite"),
        (GOOD * 1e300, "features have numbers that are not finite"),
        ("none.npy", "none.npy does not exist"),
        ("two.npz", "two.npz must hold one array, got 2"),
        ("pickled.npy", "pickled.npy cannot be read as an array of numbers"),
        ("pickled.npz", "pickled.npz cannot be read as an array of numbers"),
        ("cut.npy", "cut.npy cannot be read as an array of numbers"),
        ("cut.npz", "cut.npz cannot be read as an array of numbers"),
        ("text.npy", "text.npy cannot be read as an array of numbers"),
        ("empty.npz", "empty.npz cannot be read as an array of numbers"),
    ],
)
def test_bad_features_are_skipped(given_files, source, reason):
    source = given_files / source if isinstance(source, str) else source
    both = [Utterance(id="good", features=GOOD), Utterance(id="bad", features=source)]
    for path in (None, given_files / "train.safetensors"):
        found, (skipped,) = prepare(both, GIVEN, cache=path)
        assert found.ids == ["good"]
        assert isinstance(skipped, Skipped)
        assert skipped.id == "bad"
        assert reason in skipped.reason


def test_changed_features_are_read_anew(tmp_path):
    path = tmp_path / "train.safetensors"
    for x in (GOOD, GOOD + 1):
        found, _ = prepare([Utterance(id="a", features=x)], GIVEN, cache=path)
        np.testing.assert_array_equal(found.features, x)


@pytest.mark.parametrize("path", [None, "train.safetensors"])
def test_nothing_that_can_be_used(utterances, tmp_path, path):
    path = path and tmp_path / path
    with pytest.raises(SpeechError, match=r"none of 1 utterances can be used; the first, none: .*not exist"):
        prepare(utterances[1:2], CONFIG, cache=path)
    with pytest.raises(SpeechError, match="none of 0 utterances can be used"):
        prepare([], CONFIG, cache=path)
    assert path is None or not path.exists()


@pytest.mark.parametrize("speeds", [(), (1.0, 1.0), (0.0,), (float("nan"),), (11.0,)])
def test_speeds_that_are_none(utterances, speeds):
    with pytest.raises(ValueError, match=r"speeds must be different numbers in 0\.1 \.\. 10, got"):
        prepare(utterances, CONFIG, cache=None, speeds=speeds)


def test_given_features_at_other_tempos():
    """Every utterance exists at every tempo, prepared or computed on demand; at 1.0 it is unchanged."""
    sources = [Utterance(id="a", text="A", features=GOOD), Utterance(id="b", features=GOOD[:1])]
    speeds = (0.8, 1.0, 1.25)
    corpus, skipped = prepare(sources, GIVEN, cache=None, speeds=speeds)
    assert (corpus.ids, skipped) == (["a@0.8", "a", "a@1.25", "b@0.8", "b", "b@1.25"], [])
    frames = [corpus.frames(i) for i in range(len(corpus))]
    assert frames == [round(len(GOOD) / speed) for speed in speeds] + [1, 1, 1]
    np.testing.assert_array_equal(corpus.array(1), GOOD.astype(np.float32))
    later, _ = computed(sources, GIVEN, speeds=speeds)
    for i, count in enumerate(frames):
        assert later.frames(i) == count
        np.testing.assert_array_equal(later.array(i), corpus.array(i))

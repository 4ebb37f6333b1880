"""Features computed on demand equal those of a corpus; what is known beforehand."""

import dataclasses

import numpy as np
import pytest
import soundfile

from lintra.audio import features, waveform
from lintra.audio.errors import SpeechError
from lintra.audio.waveform import Audio
from lintra.speech.computed_corpus import computed
from lintra.speech.corpus import prepare
from lintra.speech.manifest import Utterance

CONFIG = features.Config(rate=8_000, bins=8)


def noise(samples, seed=0):
    return np.random.default_rng(seed).normal(scale=0.1, size=samples).astype(np.float32)


@pytest.fixture
def utterances(tmp_path):
    for name, rate, seed in (
        ("a.wav", 8_000, 0),
        ("b.wav", 16_000, 1),
        ("c.flac", 44_100, 2),
        ("d.mp3", 16_000, 3),
    ):
        soundfile.write(tmp_path / name, noise(rate, seed), rate)
    (tmp_path / "empty.wav").write_text("")
    (tmp_path / "text.wav").write_text("no audio")
    a = tmp_path / "a.wav"
    return [
        Utterance(id="a", text="ONE", audio=a, speaker="ann"),
        Utterance(id="none", text="X", audio=tmp_path / "none.wav"),
        *(Utterance(id=name, text=None, audio=tmp_path / name) for name in ("b.wav", "c.flac", "d.mp3")),
        Utterance(id="part", text="TWO", audio=a, start=0.25, duration=0.5, speaker="ann"),
        Utterance(id="rest", text="TWO", audio=tmp_path / "b.wav", start=0.25),
        Utterance(id="short", text="X", audio=a, duration=0.02),
        Utterance(id="memory", text="", audio=Audio(noise(3_000, 2), 8_000)),
        Utterance(id="empty", text="X", audio=tmp_path / "empty.wav", duration=1.0),
        Utterance(id="text", text="X", audio=tmp_path / "text.wav"),
        Utterance(id="late", text="X", audio=a, start=1.5),
        Utterance(id="silent", text="X"),
    ]


@pytest.mark.parametrize("speeds", [(1.0,), (0.9, 1.0, 1.1)])
def test_they_are_those_of_a_corpus(utterances, speeds):
    """Except for a frame at the end of a recording whose rate is changed."""
    kept, left_out = prepare(utterances, CONFIG, cache=None, speeds=speeds)
    seen = []
    found, skipped = computed(utterances, CONFIG, speeds=speeds, report=seen.append)
    assert seen == list(range(1, len(utterances) + 1))
    assert (found.ids, found.texts, found.speakers) == (kept.ids, kept.texts, kept.speakers)
    assert len(found) == len(kept)
    assert [x.id for x in skipped] == [x.id for x in left_out]
    for i in range(len(found)):
        own, wanted = found.array(i), kept.array(i)
        assert len(own) == found.frames(i)
        assert abs(len(own) - len(wanted)) <= 1
        both = min(len(own), len(wanted))
        np.testing.assert_array_equal(own[:both], wanted[:both], strict=True)
    every = np.concatenate([found.array(i) for i in range(len(found))])
    np.testing.assert_array_equal(found.sampled_frames(), every)


def test_lengths_are_known_without_decoding(utterances, monkeypatch):
    monkeypatch.setattr(waveform, "_read", None)
    without = [x for x in utterances if x.id not in ("d.mp3", "text")]
    found, _ = computed(without, CONFIG)
    assert "b.wav" in found.ids
    monkeypatch.setattr(waveform, "_opened", None)
    with_duration = [dataclasses.replace(x, duration=0.5, start=0.0) for x in utterances]
    found, _ = computed(with_duration, CONFIG)
    assert {found.frames(i) for i in range(len(found))} == {CONFIG.frames(4_000), CONFIG.frames(3_000)}


def test_frames_that_are_given_are_read_when_asked_for(tmp_path):
    x = noise(30).reshape(10, 3)
    np.save(tmp_path / "x.npy", x)
    given = features.Config(kind="given", bins=3)
    found, skipped = computed(
        [Utterance(id="x", text="A", features=tmp_path / "x.npy"), Utterance(id="y", features=x[:, :2])],
        given,
    )
    assert [each.id for each in skipped] == ["y"]
    assert found.frames(0) == 10
    np.testing.assert_array_equal(found.array(0), x)


def test_a_recording_that_is_not_what_it_was_is_named(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(8_000), 8_000)
    found, _ = computed(
        [
            Utterance(id="near", audio=tmp_path / "a.wav", duration=1.4),
            Utterance(id="wrong", audio=tmp_path / "a.wav", duration=2.0),
            Utterance(id="whole", audio=tmp_path / "a.wav"),
        ],
        CONFIG,
    )
    near = found.array(0)
    assert len(near) == found.frames(0) == CONFIG.frames(11_200)
    real = CONFIG.frames(8_000)
    assert (near[real:] == near[real - 1]).all()
    with pytest.raises(
        SpeechError, match=r"utterance wrong: .*a\.wav ends after 1 seconds, before the 2 asked"
    ):
        found.array(1)
    slow = [Utterance(id="near", audio=tmp_path / "a.wav", duration=1.4)]
    assert len(computed(slow, CONFIG, speeds=(0.5,))[0].array(0)) == CONFIG.frames(22_400)
    soundfile.write(tmp_path / "a.wav", noise(2_000), 8_000)
    with pytest.raises(SpeechError, match="utterance whole has 23 frames, and its duration says 98: correct"):
        found.array(2)
    (tmp_path / "a.wav").unlink()
    with pytest.raises(SpeechError, match=r"utterance whole: .*a\.wav does not exist"):
        found.array(2)


def test_refusals(utterances):
    with pytest.raises(SpeechError, match=r"none of 1 utterances can be used; the first, none: .*not exist"):
        computed(utterances[1:2], CONFIG)
    with pytest.raises(ValueError, match="speeds must be different numbers"):
        computed(utterances, CONFIG, speeds=(1.0, 1.0))

"""Transcripts of whole recordings: in a batch as alone; the search is one of two."""

import dataclasses

import numpy as np
import pytest
import torch

from lintra.audio import features, waveform
from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols
from lintra.models import ctc, encoder
from lintra.speech import Search, decoding, transcribe
from lintra.speech.alignment import align, word_times
from lintra.speech.ngram import NGram
from lintra.speech.transcription import frames_of, log_probs, words
from tests.tasks.speech import RATE, tones, write_wave


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"layers": 1, "heads": 2, "width": 16, "inputs": 16}
    config = ctc.Config(
        symbols=Symbols("character", (" ", "A", "B")),
        features=features.Config(kind="given", bins=5),
        subsample=2,
        encoder=encoder.Config(**shape),
    )
    return config.build().double().eval()


def utterances(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((n, 5)) for n in lengths]


def test_in_a_batch_as_alone(model):
    frames = utterances(31, 8, 1, 20)
    together = log_probs(model, frames)
    for found, each in zip(together, frames, strict=True):
        assert found.shape == (ctc.steps(len(each), 2), 4)
        torch.testing.assert_close(found, log_probs(model, [each])[0])


def test_no_utterances(model):
    assert log_probs(model, []) == []


def test_a_search_is_greedy_or_a_beam(model):
    (found,) = log_probs(model, utterances(30))
    assert Search()(found) == decoding.greedy(found)
    assert Search(beam=4)(found) == decoding.beam(found, width=4)[0].ids
    lm = NGram.learn([[2, 3, 2]], order=3, symbols=3)
    best = decoding.beam(found, width=4, lm=lm, weight=2.0, bonus=0.5)[0].ids
    assert Search(beam=4, lm=lm, weight=2.0, bonus=0.5)(found) == best


def test_words_are_where_their_symbols_are(model):
    """In seconds, at 0.02 per step: A A, a space, B."""
    path = [2, 0, 2, 1, 0, 3, 3]
    found = torch.full((7, 4), 0.01).scatter(1, torch.tensor(path)[:, None], 0.97).log()
    for frames, end in ((14, 0.14), (13, 0.13)):  # the last step covers two frames, or one
        one, two = words(model.config, found, [2, 2, 1, 3], frames=frames)
        assert (one.text, two.text) == ("AA", "B")
        assert (one.start, one.end, two.start, two.end) == pytest.approx((0.0, 0.06, 0.1, end))
    assert words(model.config, found, [], frames=14) == []


def test_the_times_of_a_best_path_are_those_of_its_alignment(model):
    """They are read from the path itself, without a table of frames times symbols."""
    for frames in (40, 41):
        (found,) = log_probs(model, utterances(frames))
        found = found + torch.rand(found.shape, generator=torch.Generator().manual_seed(frames)) * 9
        ids, second = decoding.greedy(found), model.config.seconds
        assert len(ids) > 5
        expected = word_times(
            model.config.symbols, ids, align(found, ids), seconds=second, end=frames * second / 2
        )
        assert words(model.config, found, ids, frames=frames) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "beam must be at least 1, got 0"),
        ({"beam": 2, "weight": -1.0}, "weight must be at least 0 and finite, got -1.0"),
        ({"beam": 2, "bonus": float("nan")}, "bonus must be finite, got nan"),
        ({"bonus": 1.0}, "a language model and a bonus are for a beam, got beam=None"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(**settings)


def test_frames_of_another_width(model):
    with pytest.raises(ValueError, match="x must"):
        log_probs(model, [np.zeros((4, 6))])


@pytest.fixture
def hearing(model):
    """A model that reads audio, with dropout that would change its output."""
    shape = {"inputs": 16, "dropout": 0.5}
    config = dataclasses.replace(
        model.config,
        features=features.Config(rate=RATE, bins=20),
        encoder=dataclasses.replace(model.config.encoder, **shape),
    )
    return config.build()


@pytest.mark.parametrize("search", [None, Search(beam=4)])
def test_a_transcript_is_what_its_parts_give(hearing, tmp_path, search):
    """For a file and for its samples; a model in training mode stays in it."""
    samples = tones("AB BA")
    file = write_wave(tmp_path / "a.wav", samples)
    transcript = transcribe(hearing, file, search=search)
    assert transcript == transcribe(hearing, str(file), search=search)
    assert hearing.training
    frames = frames_of(file, hearing.config.features)
    found = log_probs(hearing.eval(), [frames])[0]
    ids = (search or Search())(found)
    assert transcript.text == hearing.config.symbols.decode(ids)
    assert transcript.words == words(hearing.config, found, ids, frames=len(frames))
    assert transcript.words
    assert 0 <= len(samples) / RATE - transcript.duration < 0.025  # a frame
    without = transcribe(hearing, file, search=search, timestamps=False)
    assert without == dataclasses.replace(transcript, words=[])


def test_samples_are_heard_as_their_file(hearing, tmp_path):
    file = write_wave(tmp_path / "a.wav", tones("AB"))
    assert transcribe(hearing, waveform.read(file, RATE), rate=RATE) == transcribe(hearing, file)


def test_features_are_heard_as_their_file(model, tmp_path):
    (frames,) = utterances(30)
    np.save(tmp_path / "a.npy", frames)
    transcript = transcribe(model, tmp_path / "a.npy")
    assert transcript == transcribe(model, frames)
    assert transcript.text
    assert transcript.duration == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("audio", "rate", "error", "message"),
    [
        (np.zeros(RATE), None, ValueError, "rate must say how many samples a second audio has, got None"),
        (np.zeros((RATE, 2)), RATE, SpeechError, r"samples must be floats \[n\]"),
        ("a.wav", RATE, ValueError, f"rate is for samples: a.wav has its own, got {RATE}"),
        ("nowhere.wav", None, SpeechError, "nowhere.wav does not exist"),
        (np.zeros(9), RATE, SpeechError, "are too short for a frame of 25 ms"),
    ],
)
def test_audio_that_is_refused(hearing, audio, rate, error, message):
    with pytest.raises(error, match=message):
        transcribe(hearing, audio, rate=rate)


def test_features_that_are_refused(model):
    with pytest.raises(ValueError, match="rate is for samples, and this model hears features: leave it out"):
        transcribe(model, np.zeros(RATE), rate=RATE)
    with pytest.raises(SpeechError, match=r"features must be floats \[t 5\], got float64 \[9, 6\]"):
        transcribe(model, np.zeros((9, 6)))
    with pytest.raises(SpeechError, match="this model was trained on features of 5 numbers a frame, not on"):
        transcribe(model, "a.wav")

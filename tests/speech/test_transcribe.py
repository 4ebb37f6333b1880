"""What is heard in whole utterances: in a batch what it is alone; a search is one of the two there are."""

import numpy as np
import pytest
import torch

from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.models import ctc, encoder
from lintra.speech import decoding
from lintra.speech.ngram import NGram
from lintra.speech.transcribe import Search, log_probs, words


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
    """In seconds, 0.02 a step: A A, a space, B."""
    path = [2, 0, 2, 1, 0, 3, 3]
    found = torch.full((7, 4), 0.01).scatter(1, torch.tensor(path)[:, None], 0.97).log()
    for frames, end in ((14, 0.14), (13, 0.13)):  # the last step stands for two frames, or for one
        one, two = words(model.config, found, [2, 2, 1, 3], frames=frames)
        assert (one.text, two.text) == ("AA", "B")
        assert (one.start, one.end, two.start, two.end) == pytest.approx((0.0, 0.06, 0.1, end))
    assert words(model.config, found, [], frames=14) == []


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

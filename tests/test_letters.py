"""experiments/speech/letters.py: a recogniser of cepstra, converted to mel energies, writes the same."""

import dataclasses
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import delta
from lintra.audio import features
from lintra.audio.symbols import learn
from lintra.models import ctc, encoder
from lintra.nn import lengths_to_mask
from lintra.speech import Search, transcription

letters = runpy.run_path(str(Path(__file__).parents[1] / "experiments" / "speech" / "letters.py"))
BINS = letters["AUDIO"].bins


def recogniser(**changes):
    """A small causal recogniser of 13 cepstra, in float64, with a mean and a scale."""
    layers = encoder.Config(
        inputs=16, attention=delta.Config(), layers=1, heads=2, width=16, causal=True, position="rotary"
    )
    given = features.Config(kind="given", bins=13)
    config = ctc.Config(
        symbols=learn(["ABC"], "character"), features=given, normalize="global", subsample=4, encoder=layers
    )
    torch.manual_seed(0)
    model = dataclasses.replace(config, **changes).build().double().eval()
    if model.config.normalize == "global":
        model.mean.copy_(torch.randn(13))
        model.scale.copy_(torch.rand(13) + 0.5)
    return model


def cepstra(energies):
    """The cepstra of log-mel energies [b t 40] from triangles of height 1."""
    return (energies + letters["unit_area"]()) @ letters["cosines"]().T


def test_it_writes_of_energies_what_it_wrote_of_their_cepstra():
    """For any energies, not only the flattest with these cepstra; at the edges and in padding too."""
    model, generator = recogniser(), np.random.default_rng(0)
    energies = generator.normal(size=(3, 23, BINS)) * 3 - 5
    mask = lengths_to_mask(torch.tensor([23, 9, 16]), 23)
    expected, kept = model(torch.from_numpy(cepstra(energies)), mask=mask)
    found, still = letters["hearing"](model)(torch.from_numpy(energies), mask=mask)
    assert torch.equal(kept, still)
    # The mean is stored in float32.
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_cepstra_are_lifted_to_energies_that_have_them():
    wanted = np.random.default_rng(0).normal(size=(5, 13))
    np.testing.assert_allclose(cepstra(letters["lifted"](wanted)), wanted, atol=1e-5)


def test_louder_audio_has_another_first_cepstrum():
    """The first is the mean energy, in which the first bin counts half; the others hardly change."""
    shift = cepstra(np.full(BINS, 2.0)) - cepstra(np.zeros(BINS))
    assert shift[0] == pytest.approx(2 * (1 - 0.5 / BINS))
    assert np.abs(shift[1:]).max() < 2 / BINS


def test_energies_are_those_of_triangles_of_unit_area():
    """A filter has height 1: its area is half its base, as far as the spectrum resolves it."""
    config = letters["AUDIO"]
    area = features._filters(config).sum(1) * config.rate / features._padded(config)
    np.testing.assert_allclose(np.exp(-letters["unit_area"]()), area, rtol=0.15)
    wide = area > 200
    np.testing.assert_allclose(np.exp(-letters["unit_area"]())[wide], area[wide], rtol=0.02)


@pytest.mark.parametrize(
    "changes",
    [{"normalize": "utterance"}, {"features": features.Config(kind="given", bins=12)}],
    ids=["per utterance", "other width"],
)
def test_other_recognisers_are_refused(changes):
    model = dataclasses.replace(recogniser().config, **changes).build()
    with pytest.raises(ValueError, match="needs a recogniser of 13 given numbers a frame with"):
        letters["hearing"](model)


def test_one_without_convolutions_is_refused():
    narrow = dataclasses.replace(recogniser().config.encoder, inputs=13)
    with pytest.raises(ValueError, match="needs a convolution to put the cosines in, got subsample=1"):
        letters["hearing"](recogniser(subsample=1, encoder=narrow))


def test_the_recogniser_that_comes_with_the_library_writes_what_is_said():
    """Four utterances of AN4's test set, of three speakers whom it has not heard, by their cepstra."""
    place = Path(__file__).parent / "data" / "an4"
    utterances = json.loads((place / "index.json").read_text())
    cepstra = np.load(place / "cepstra.npy").astype(np.float32)
    model = checkpoint.load(checkpoint.find("spoken-letters"))
    ends = np.cumsum([each["frames"] for each in utterances])
    for each, own in zip(utterances, np.split(cepstra, ends[:-1]), strict=True):
        log_probs = transcription.log_probs(model, [letters["lifted"](own)])[0]
        assert model.config.symbols.decode(Search()(log_probs)) == each["text"]

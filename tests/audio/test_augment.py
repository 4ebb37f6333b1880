"""SpecAugment: what is hidden, how much at most, and that padding takes no part in it. Tempos."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.audio.augment import changed_tempo, spec_augment
from lintra.nn import lengths_to_mask

NOTHING = {"bands": 0, "spans": 0}


def features(b=3, t=20, i=8, seed=0):
    return torch.randn(b, t, i, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def intervals(hidden):
    """The number of runs of True in a vector."""
    return int(hidden[0]) + int((hidden[1:] & ~hidden[:-1]).sum())


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 6)),
    st.integers(0, 2),
    st.floats(0, 1),
    st.integers(0, 2),
    st.integers(0, 9),
    st.integers(0, 10_000),
)
def test_bands_and_spans_are_hidden_and_nothing_else(shape, bands, band, spans, span, seed):
    x = features(*shape, seed=seed)
    lengths = torch.randint(1, shape[1] + 1, (shape[0],), generator=draw(seed))
    mask = lengths_to_mask(lengths, shape[1])
    y = spec_augment(x, mask, draw(seed), bands=bands, band=band, spans=spans, span=span, share=1.0)
    for one, other, n in zip(x, y, lengths.tolist(), strict=True):
        changed = one != other
        assert not changed[n:].any()
        changed, mean = changed[:n], one[:n].mean(0).expand(n, -1)
        if n > 1:  # the mean of one frame is that frame
            in_band, in_span = changed.all(0), changed.all(1)
            assert torch.equal(changed, in_band[None] | in_span[:, None])
            if not in_span.all() and not in_band.all():
                assert intervals(in_band) <= bands
                assert in_band.sum() <= bands * int(band * shape[2])
                assert intervals(in_span) <= spans
                assert in_span.sum() <= spans * span
        assert_close(other[:n][changed], mean[changed])


def test_widths_and_places_are_equally_likely():
    """Each band of 1 is equally likely; of the 3 bands of 2, one covers each edge bin, two the others."""
    x = features(b=20_000, t=2, i=4)
    hidden = spec_augment(x, None, draw(), bands=1, band=0.5, spans=0) != x
    share = hidden.all(1).double().mean(0)
    one, two = 1 / 4, torch.tensor([1, 2, 2, 1], dtype=torch.float64) / 3
    # Means of 20,000 draws: a standard deviation of 0.004.
    assert_close(share, (one + two) / 3, atol=0.02, rtol=0)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_span_is_at_most_a_share_of_its_utterance(share):
    x = features(b=500)
    lengths = torch.randint(2, 21, (500,), generator=draw())
    y = spec_augment(x, lengths_to_mask(lengths, 20), draw(), bands=0, spans=1, span=15, share=share)
    hidden = (x != y).all(2).sum(1)
    assert (hidden <= (lengths * share).long().clamp(max=15)).all()
    assert share == 0 or (hidden == (lengths * share).long().clamp(max=15)).any()


def test_padding_changes_nothing_and_stays():
    x, mask = features(), lengths_to_mask(torch.tensor([20, 7, 0]))
    for stuff in (float("nan"), float("inf"), 7.0):
        padded = x.masked_fill(~mask[..., None], stuff)
        y = spec_augment(padded, mask, draw())
        assert_close(y[mask], spec_augment(x, mask, draw())[mask], rtol=0, atol=0)
        assert_close(y[~mask], padded[~mask], rtol=0, atol=0, equal_nan=True)


def test_an_utterance_is_hidden_alike_however_long_the_batch():
    """A batch makes the same number of draws, whatever it holds."""
    x = features(b=2)
    short = spec_augment(x[:, :9], lengths_to_mask(torch.tensor([9, 5])), draw(3))
    long = spec_augment(x, lengths_to_mask(torch.tensor([9, 5]), 20), draw(3))
    mask = lengths_to_mask(torch.tensor([9, 5]))
    assert_close(long[:, :9][mask], short[mask], rtol=0, atol=0)


def test_the_generator_decides_and_the_global_one_is_not_touched():
    x, before = features(), torch.get_rng_state()
    assert torch.equal(spec_augment(x, None, draw()), spec_augment(x, None, draw()))
    assert not torch.equal(spec_augment(x, None, draw()), spec_augment(x, None, draw(1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, features())  # the input is unchanged


def test_nothing_to_hide():
    x = features()
    for options in (NOTHING, {"band": 0.0, "span": 0}, {"band": 0.0, "share": 0.0}):
        assert torch.equal(spec_augment(x, None, draw(), **options), x)


def test_features_that_need_a_gradient():
    """Where something is hidden, the gradient sees only the mean."""
    x = features(b=1).requires_grad_()
    spec_augment(x, None, draw(), bands=0, spans=1, span=20, share=1.0).sum().backward()
    assert_close(x.grad.sum(), torch.tensor(float(x.numel()), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_numbers(dtype):
    x = features().to(dtype)
    y = spec_augment(x, None, draw())
    assert y.dtype == dtype
    assert y.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bands": -1}, "bands must be at least 0, got -1"),
        ({"band": -0.1}, r"band must be in \[0, 1\], got -0\.1"),
        ({"spans": -1}, "spans must be at least 0"),
        ({"span": -1}, "span must be at least 0"),
        ({"share": 1.1}, r"share must be in \[0, 1\], got 1\.1"),
        ({"share": float("nan")}, r"share must be in \[0, 1\], got nan"),
        ({"x": torch.zeros(2, 3)}, r"x must have the 3 axes \[b t i\], got shape \[2, 3\]"),
        ({"x": torch.zeros(3, 20, 8, dtype=torch.long)}, "x must be float16.*got torch.int64"),
        ({"mask": torch.ones(3, 19, dtype=torch.bool)}, r"mask must be \[b=3 t=20\], got shape \[3, 19\]"),
        ({"mask": torch.ones(3, 20)}, "mask must be boolean"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        spec_augment(**{"x": features(), "mask": None, "generator": draw(), **options})


@pytest.mark.parametrize("speed", [0.5, 0.9, 1.0, 1.1, 3.0, 100.0])
@pytest.mark.parametrize("t", [1, 2, 7, 100])
def test_what_rises_evenly_does_so_at_any_tempo(t, speed):
    """From the first frame to the last, in as many frames as the tempo leaves."""
    x = (np.arange(t)[:, None] * np.array([1.0, -2.0]) + 3).astype(np.float32)
    y = changed_tempo(x, speed)
    frames = max(1, round(t / speed))
    assert (y.shape, y.dtype) == ((frames, 2), np.float32)
    np.testing.assert_allclose(y, np.linspace(x[0], x[-1], frames), rtol=1e-6, atol=1e-5)


def test_no_frames_have_no_tempo():
    assert changed_tempo(np.zeros((0, 3), np.float32), 2.0).shape == (0, 3)

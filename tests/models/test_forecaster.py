"""Forecasters: the RNN equals the parallel form, nothing looks ahead, units do not matter."""

import warnings

import pytest
import torch
from torch.ao.quantization import quantize_dynamic
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import gated, linear, softmax
from lintra.generation.forecasting import quantiles, sample_paths
from lintra.generation.uniforms import sequence_generator, sequence_seed
from lintra.models import forecaster
from lintra.nn import Gaussian, Quantiles, StudentT
from lintra.nn.scaling import FLATTEST
from lintra.testing.laws import EXACT

OUTPUTS = [Gaussian(), StudentT(), Quantiles(levels=(0.1, 0.5, 0.9))]
SMALL = {"layers": 2, "heads": 2, "width": 16, "lags": (1, 2, 7), "scale_rows": 12}


def built(output=OUTPUTS[0], **changes):
    torch.manual_seed(0)
    model = forecaster.Config(**SMALL | {"output": output} | changes).build().double().eval()
    torch.nn.init.normal_(model.shortcut.weight, std=0.5)
    return model


def series(batch=3, rows=40):
    generator = torch.Generator().manual_seed(1)
    return 50 + torch.randn(batch, rows, generator=generator, dtype=torch.float64).cumsum(1)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("attention", [linear.Config(), gated.Config(), softmax.Config()])
@pytest.mark.parametrize("cuts", [[1] * 40, [30, 1, 9]])
def test_row_by_row_is_the_whole_series(output, attention, cuts):
    model, values = built(output, attention=attention), series()
    state, parts = None, []
    for piece in values.split(cuts, 1):
        prediction, state = model.extend(piece, state)
        parts.append(prediction)
    for whole, *pieces in zip(model(values), *parts, strict=True):
        assert_close(torch.cat(pieces, 1), whole, **EXACT)


def test_the_shortcut_begins_with_nothing():
    assert not forecaster.Config(**SMALL).build().shortcut.weight.any()


@pytest.mark.parametrize("position", ["none", "sinusoidal", "rotary"])
def test_the_future_changes_no_earlier_prediction(position):
    """It leaks neither through attention nor through the scale of the values."""
    model, values = built(position=position), series()
    before = model(values)
    for x in (0.0, 1e9, -values[:, 25:]):
        changed = values.clone()
        changed[:, 25:] = x
        for a, b in zip(before, model(changed), strict=True):
            assert torch.equal(a[:, :25], b[:, :25])


def test_units_do_not_matter():
    """A series in other units, at another level, has the same distributions in these units."""
    model, values = built(), series()
    assert (values.std() > 100 * FLATTEST * values.abs().mean()).all()
    plain, other = model(values[:, :30]), model(values[:, :30] * 1000 - 7)
    # At the first values the scale is at its minimum, which depends on the level.
    mine = slice(5, None)
    assert_close(other.location[:, mine], plain.location[:, mine] * 1000 - 7)
    assert_close(other.scale[:, mine], plain.scale[:, mine] * 1000)
    times = model(values[:, :30] * 1000)
    assert_close(times.params, plain.params, **EXACT)
    assert_close(times.standardised(values[:, 1:31] * 1000), plain.standardised(values[:, 1:31]), **EXACT)
    assert_close(plain.restored(plain.standardised(values[:, 1:31])), values[:, 1:31], **EXACT)


def test_a_lag_is_the_value_that_stood_there():
    model, values = built(lags=(2, 5)), series(2, 12)
    layout = model.input_layout(values)
    z, location, scale, *_ = model._inputs(values, model._before(2), layout)
    for row in range(12):
        for place, lag in enumerate((0, 2, 5)):
            expected = (values[:, row - lag] - location[:, row]) / scale[:, row] if row >= lag else 0.0
            assert_close(z[:, row, place], torch.as_tensor(expected).expand(2).double())


def test_a_constant_series_and_zeros_give_finite_losses():
    model = built(StudentT())
    values = torch.stack((torch.full((30,), 7.0), torch.zeros(30))).double()
    prediction = model(values)
    loss = model.output.loss(prediction.params, prediction.standardised(values))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)


def test_values_keep_their_digits_in_autocast():
    model, values = built().float(), series()
    with torch.autocast("cpu", torch.bfloat16):
        prediction = model(values)
    assert prediction.params.dtype == torch.float32
    expected = model(values)
    assert_close(prediction.params, expected.params, rtol=0, atol=0.05)  # the blocks have 8-bit weights
    model.head.weight.data.zero_()  # the shortcut alone
    expected = model(values)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(values).params, expected.params, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda x: type(x).__name__)
def test_a_saved_forecaster(output, tmp_path):
    model, values = built(output).float(), series()
    model.scaling.typical.fill_(9.0)
    checkpoint.save(model, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model")
    assert loaded.config == model.config
    for a, b in zip(loaded(values), model(values), strict=True):
        assert torch.equal(a, b)
    state = model.extend(values)[1]
    checkpoint.save_state(state, tmp_path / "state.safetensors")
    again = checkpoint.load_state(model.start(3), tmp_path / "state.safetensors")
    for a, b in zip(
        loaded.extend(values[:, :2], again)[0], model.extend(values[:, :2], state)[0], strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda x: type(x).__name__)
def test_paths_are_those_of_the_whole_series_read_again(output):
    """The definition: each sampled row is appended, and the whole series is read again."""
    model, values = built(output), series(2, 20)
    found = sample_paths(model, values, horizon=6, samples=3, seed=5)
    generators = [sequence_generator(5, i) for i in range(2)]
    grown = values.repeat_interleave(3, 0)
    with torch.no_grad():
        for _ in range(6):
            prediction = model(grown).last()
            params = zip(prediction.params.split(3), generators, strict=True)
            following = torch.cat([output.sample(part, generator) for part, generator in params])
            grown = torch.cat((grown, prediction.restored(following)), 1)
    assert_close(found, grown[:, 20:].unflatten(0, (2, 3)), **EXACT)
    assert torch.equal(found, sample_paths(model, values, horizon=6, samples=3, seed=5))
    assert not torch.equal(found, sample_paths(model, values, horizon=6, samples=3, seed=6))
    alone = sample_paths(model, values[1:], horizon=6, samples=3, seed=sequence_seed(5, 1))
    assert_close(alone[0], found[1], **EXACT)


def test_paths_that_leave_the_numbers_are_no_fault_of_the_history():
    model, values = built(OUTPUTS[0]), series(1, 20)
    with torch.no_grad():
        model.shortcut.weight *= 1e150
    with pytest.raises(ValueError, match=r"the sampled paths are beyond the largest numbers after \d values"):
        sample_paths(model, values, horizon=9, samples=2, seed=5)


def test_paths_one_row_ahead_are_of_the_predicted_distribution():
    model, values = built(StudentT()), series(2, 20)
    with torch.no_grad():
        expected = quantiles(model, model(values).last(), (0.1, 0.5, 0.9))[:, 0]
    paths = sample_paths(model, values, horizon=1, samples=20_000, seed=0)[..., 0]
    for i, level in enumerate((0.1, 0.5, 0.9)):
        share = (paths < expected[:, i : i + 1]).double().mean(1)
        assert (share - level).abs().max() < 0.015  # four standard deviations of a share of 20,000


def test_no_series_have_no_paths():
    assert sample_paths(built(), torch.zeros(0, 9), horizon=2, samples=3).shape == (0, 3, 2)


def test_bad_input_is_refused():
    model, values = built(), series()
    with pytest.raises(ValueError, match="values must be finite, got NaN or infinity"):
        model(values.masked_fill(values > 50, torch.nan))
    with pytest.raises(TypeError, match=r"values must be float16, .* got torch\.int64"):
        model(values.long())
    with pytest.raises(ValueError, match="values"):
        model(values[0])
    state = model.extend(values)[1]
    with pytest.raises(ValueError, match="state is for 3 sequences, values for 2"):
        model.extend(values[:2], state)
    with pytest.raises(ValueError, match="state must remember 9 places"):
        built(lags=(9,)).extend(values, state)
    for settings, message in (
        ({"lags": (0,)}, "lags must be different offsets, each at least 1"),
        ({"lags": (2, 2)}, "lags must be different offsets, each at least 1"),
        ({"scale_rows": 0}, "scale_rows must be at least 1"),
        ({"position": "concatenated"}, "position 'concatenated' is for symbols"),
    ):
        with pytest.raises(ValueError, match=message):
            forecaster.Config(**SMALL | settings)
    for settings, message in (
        ({"horizon": 0}, "horizon must be at least 1, got 0"),
        ({"horizon": 1, "samples": 0}, "samples must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_paths(model, values, **settings)
    with pytest.raises(ValueError, match="history must be at least one value"):
        sample_paths(model, values[:, :0], horizon=1)


def test_equal_series_have_paths_of_their_own():
    model = built()
    history = torch.randn(1, 12).cumsum(1).expand(3, -1)
    first, second, third = sample_paths(model, history, horizon=2, samples=3, seed=7)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    other = sample_paths(model, history[:1], horizon=2, samples=3, seed=7 + 2**32)
    assert not torch.equal(first, other[0])


def test_one_of_8_bits_runs():
    model = forecaster.Config(layers=1, heads=2, width=16).build().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
        small = quantize_dynamic(model)
    values = torch.randn(2, 9)
    assert_close(small(values).params, model(values).params, rtol=0.2, atol=0.2)


def test_levels_of_a_16_bit_model_keep_their_digits():
    for output in (Gaussian(), StudentT()):
        model = forecaster.Config(layers=1, heads=2, width=8, output=output).build().bfloat16().eval()
        found = quantiles(model, model(torch.randn(1, 20)), [0.9, 0.999, 0.9999])[0, -1]
        assert found.isfinite().all()
        assert (found.diff() > 0).all()

"""The LSTM baseline: the interface of an encoder, and its padding laws."""

import warnings

import pytest
import torch
from torch.ao.quantization import quantize_dynamic
from torch.testing import assert_close

from lintra.models import bilstm

EXACT = {"rtol": 1e-9, "atol": 1e-11}
MASK = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False] * 3 + [True, False] * 3, [False] * 9])


def build(**changes):
    torch.manual_seed(0)
    options = {"vocabulary": 11, "layers": 2, "width": 6, "outputs": 3} | changes
    return bilstm.Config(**options).build().double().eval()


@pytest.mark.parametrize("pool", ["mean", "first", "last", None])
def test_ragged_batches_are_their_sequences_alone(pool):
    """Even with NaN in the padding; the last sequence has no real token."""
    model = build(vocabulary=None, inputs=5, pool=pool)
    x = torch.randn(4, 9, 5, dtype=torch.float64)
    found = model(x.masked_fill(~MASK[..., None], torch.nan), mask=MASK)
    for i in range(4):
        alone = model(x[i : i + 1, MASK[i]])[0]
        assert_close(found[i] if pool else found[i][MASK[i]], alone, **EXACT)
    if pool is None:
        assert (found[~MASK] == 0).all()
    dirty, clean = (
        torch.autograd.grad(
            model(x.masked_fill(~MASK[..., None], junk), mask=MASK).square().sum(), list(model.parameters())
        )
        for junk in (torch.nan, 0.0)
    )
    assert_close(dirty, clean, rtol=0, atol=0)
    assert all(g.isfinite().all() for g in clean)


def test_it_is_the_recurrence():
    """One layer compared with the textbook recurrence, in both directions."""
    model = build(layers=1, pool=None, outputs=None)
    x = torch.randint(0, 11, (1, 7))
    inputs = model.embedding(x)[0]

    def run(suffix, order):
        h = c = torch.zeros(6, dtype=torch.float64)
        weights = [getattr(model.lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh")]
        bias = sum(getattr(model.lstm, f"{name}_l0{suffix}") for name in ("bias_ih", "bias_hh"))
        found = {}
        for i in order:
            enter, forget, new, leave = (weights[0] @ inputs[i] + weights[1] @ h + bias).chunk(4)
            c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
            h = leave.sigmoid() * c.tanh()
            found[i] = h
        return torch.stack([found[i] for i in range(7)])

    expected = torch.cat((run("", range(7)), run("_reverse", reversed(range(7)))), 1)
    assert_close(model(x)[0], expected, **EXACT)


def test_dropout_is_between_layers_only_where_there_are_two():
    x = torch.randint(0, 11, (2, 9))
    for layers in (1, 2):
        model = build(layers=layers, dropout=0.5)
        assert_close(model(x), build(layers=layers)(x), rtol=0, atol=0)
        assert not torch.equal(model.train()(x), model(x))
        model.dropout = torch.nn.Identity()  # before the layers
        assert torch.equal(model(x), model(x)) is (layers == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": 4}, "one of vocabulary and inputs must be given"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_tokens_are_checked():
    with pytest.raises(ValueError, match="tokens must be between 0 and 10, got 11"):
        build()(torch.tensor([[11]]))
    assert build(pool="mean")(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 3)


def test_one_of_8_bits_runs():
    model = build(vocabulary=None, inputs=5).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantize_dynamic is deprecated
        small = quantize_dynamic(model)
    x = torch.randn(2, 7, 5)
    assert_close(small(x), model(x), rtol=0.1, atol=0.1)

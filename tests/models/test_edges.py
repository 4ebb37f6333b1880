"""Common mistakes with the tensors passed to a network: reported there, in words, by every network."""

import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lintra.attention import linear, softmax
from lintra.audio import features
from lintra.audio.symbols import learn
from lintra.models import bilstm, ctc, decoder, encoder, seq2seq
from lintra.nn import AttentionLayer, lengths_to_mask, parameters

SHAPE = {"layers": 1, "heads": 2, "width": 16}
READS = encoder.Config(inputs=6, attention=softmax.Config(), **SHAPE)
LENGTHS = torch.tensor([5, 2, 3])
READERS = {
    "heads": AttentionLayer(6, linear.Config(), heads=2, causal=False),
    "encoder": READS.build(),
    "bilstm": bilstm.Config(inputs=6, layers=1, width=4).build(),
    "ctc": ctc.Config(
        symbols=learn(["AB"], "character"),
        features=features.Config(kind="given", bins=6),
        subsample=2,
        encoder=READS,
    ).build(),
}
MASKED = {
    name: lambda mask, model=model: model(torch.randn(3, 5, 6), mask=mask) for name, model in READERS.items()
}
MASKED |= {
    "decoder": lambda mask: decoder.Config(vocabulary=7, **SHAPE).build()(torch.ones(3, 5).long(), mask=mask),
    "seq2seq": lambda mask: (
        seq2seq.Config(vocabulary=7, encoder=READS, **SHAPE).build().encode_memory(torch.randn(3, 5, 6), mask)
    ),
    "cross": lambda mask: READERS["heads"].encode_memory(torch.randn(3, 5, 6), mask),
}


@pytest.mark.parametrize("read", MASKED.values(), ids=MASKED)
def test_a_mask_of_the_opposite_convention_is_noticed(read):
    """For a batch padded at the end to its longest sequence, and for one without padding."""
    real = lengths_to_mask(LENGTHS)
    for mask in (real, torch.ones_like(real)):
        with pytest.warns(
            UserWarning, match=r"PyTorch's is True for padding: pass mask=~key_padding_mask"
        ) as told:
            read(~mask)
        assert {each.filename for each in told} == {__file__}  # the caller's line, not one of lintra's
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(mask)


@pytest.mark.parametrize("read", MASKED.values(), ids=MASKED)
def test_a_sequence_of_nothing_among_others_is_legal(read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(lengths_to_mask(torch.tensor([5, 0, 3])))
        read(lengths_to_mask(torch.tensor([4, 0, 3]), 5))  # padded to a fixed length, as in some data sets
        read(lengths_to_mask(LENGTHS).flip(1))  # padded at the beginning
        read(torch.ones(3, 5, dtype=torch.bool))


def test_no_mask_is_looked_at_inside_a_transform():
    layer = READERS["heads"]
    inverted = ~lengths_to_mask(LENGTHS)
    x = torch.randn(3, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(lambda x, mask: layer(x[None], mask=mask[None]))(x, inverted)
        torch.export.export(layer, (x,), {"mask": inverted}, strict=False)


class Looks(TorchFunctionMode):
    """Counts how often a tensor is asked whether any of its values is True."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.any
        return func(*args, **(kwargs or {}))


def test_a_mask_is_looked_at_once_and_not_in_each_layer():
    looks = []
    for layers in (1, 4):
        model = encoder.Config(inputs=6, attention=linear.Config(), **SHAPE | {"layers": layers}).build()
        with Looks() as mode:
            model(torch.randn(3, 5, 6), mask=lengths_to_mask(LENGTHS))
        looks.append(mode.count)
    assert looks[0] == looks[1] > 0


def test_a_mask_that_was_changed_in_place_is_looked_at_again():
    layer, x, mask = READERS["heads"], torch.randn(3, 5, 6), lengths_to_mask(LENGTHS)
    layer(x, mask=mask)
    with pytest.warns(UserWarning, match="pass mask=~key_padding_mask"):
        layer(x, mask=mask.logical_not_())
    with torch.inference_mode():  # tensors have no version there
        layer(x, mask=lengths_to_mask(LENGTHS))


def test_the_dtype_of_a_layer_is_that_of_one_weight(monkeypatch):
    """Walking the parameters in each layer of each step is a cost to be paid only after an error."""
    layer = AttentionLayer(6, linear.Config(), heads=2)
    x, state = torch.randn(3, 1, 6), layer.start(3)

    def walked(module):
        raise AssertionError("the parameters were walked")

    monkeypatch.setattr(parameters, "reference_param", walked)
    layer.extend(x, state)
    layer(x)
    with pytest.raises(AssertionError, match="walked"):
        layer(x.double())


@pytest.mark.parametrize("model", READERS.values(), ids=READERS)
def test_features_of_another_dtype_than_the_weights_are_refused(model):
    x = torch.randn(3, 5, 6)
    message = (
        r"x must have the dtype of the weights, torch\.float32, got torch\.float64: call x\.to\(torch\.fl"
    )
    with pytest.raises(TypeError, match=message):
        model(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # autocast converts it
        with pytest.raises(TypeError, match=message):
            model(x.double())
    with pytest.raises(TypeError, match=r"got torch\.bfloat16"):
        model(x.bfloat16())

"""What people get wrong where tensors enter a network: said there, in words, whatever the network."""

import warnings

import pytest
import torch

from lintra.attention import linear, softmax
from lintra.models import bilstm, ctc, decoder, encoder, seq2seq
from lintra.nn import Heads, lengths_to_mask
from lintra.speech import features
from lintra.speech.symbols import learn

SHAPE = {"layers": 1, "heads": 2, "width": 16}
READS = encoder.Config(inputs=6, attention=softmax.Config(), **SHAPE)
LENGTHS = torch.tensor([5, 2, 3])
READERS = {
    "heads": Heads(6, linear.Config(), heads=2, causal=False),
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
        seq2seq.Config(vocabulary=7, encoder=READS, **SHAPE).build().remember(torch.randn(3, 5, 6), mask)
    ),
    "cross": lambda mask: READERS["heads"].remember(torch.randn(3, 5, 6), mask),
}


@pytest.mark.parametrize("read", MASKED.values(), ids=MASKED)
def test_a_mask_of_the_opposite_convention_is_noticed(read):
    """Of a batch padded to its longest sequence, at either end, and of one without padding."""
    real = lengths_to_mask(LENGTHS)
    for mask in (real, real.flip(1), torch.ones_like(real)):
        with pytest.warns(
            UserWarning, match=r"True for padding, as PyTorch's is, say mask=~key_padding_mask"
        ):
            read(~mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(mask)


@pytest.mark.parametrize("read", MASKED.values(), ids=MASKED)
def test_a_sequence_of_nothing_among_others_is_legal(read):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(lengths_to_mask(torch.tensor([5, 0, 3])))
        read(torch.ones(3, 5, dtype=torch.bool))


def test_no_mask_is_looked_at_inside_a_transform():
    layer = READERS["heads"]
    inverted = ~lengths_to_mask(LENGTHS)
    x = torch.randn(3, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(lambda x, mask: layer(x[None], mask=mask[None]))(x, inverted)
        torch.export.export(layer, (x,), {"mask": inverted}, strict=False)


@pytest.mark.parametrize("model", READERS.values(), ids=READERS)
def test_features_of_another_dtype_than_the_weights_are_refused(model):
    x = torch.randn(3, 5, 6)
    message = (
        r"x must have the dtype of the weights, torch\.float32, got torch\.float64: call x\.to\(torch\.fl"
    )
    with pytest.raises(TypeError, match=message):
        model(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # which autocast brings to one
        with pytest.raises(TypeError, match=message):
            model(x.double())
    with pytest.raises(TypeError, match=r"got torch\.bfloat16"):
        model(x.bfloat16())

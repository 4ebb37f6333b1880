"""Weights under other names, and models that share theirs."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lintra.compat.fast_transformers.builders import RecurrentEncoderBuilder, TransformerEncoderBuilder
from lintra.compat.fast_transformers.feature_maps import Favor
from lintra.compat.fast_transformers.masking import TriangularCausalMask
from lintra.compat.fast_transformers.utils import make_mirror
from lintra.compat.fast_transformers.weight_mapper import (
    HugginfaceBertEncoderMapper,
    IdentityRule,
    LongformerMapper,
    NotRule,
    OrRule,
    PytorchAttentionWeightsRule,
    PytorchMapper,
    RegexRule,
    SimpleMapper,
)
from lintra.testing.laws import EXACT

SIZES = {
    "n_layers": 2,
    "n_heads": 2,
    "query_dimensions": 4,
    "value_dimensions": 4,
    "feed_forward_dimensions": 12,
    "dropout": 0.0,
}
# The parts of a layer of BERT: their names there, and their names here.
BERT = {
    "attention.self.query": "attention.query_projection",
    "attention.self.key": "attention.key_projection",
    "attention.self.value": "attention.value_projection",
    "attention.output.dense": "attention.out_projection",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}


def encoder(builder=TransformerEncoderBuilder, **options):
    return builder.from_kwargs(**SIZES | {"attention_dropout": 0.0} | options).get().double()


def pytorch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)  # no bias is 0 and no gain is 1
    return theirs


def test_an_encoder_of_pytorch_gives_the_same():
    theirs, ours, x = pytorch(), encoder(final_normalization=False), torch.rand(3, 5, 8, dtype=torch.float64)
    ours.load_state_dict(PytorchMapper().map(theirs.state_dict()))
    assert_close(ours(x), theirs(x), **EXACT)


def test_mapped_files(tmp_path):
    theirs, ours, x = pytorch(), encoder(final_normalization=False), torch.rand(3, 5, 8, dtype=torch.float64)
    torch.save(theirs.state_dict(), tmp_path / "bare.pt")
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "inside.pt")
    inside = PytorchMapper.load_file(tmp_path / "inside.pt", model_root="model", map_location="cpu")
    assert inside["epoch"] == 3
    for state in (PytorchMapper.load_file(tmp_path / "bare.pt"), inside["model"]):
        ours.load_state_dict(state)
        assert_close(ours(x), theirs(x), **EXACT)


def test_files_are_not_unpickled(tmp_path):
    torch.save({"weight": torch.zeros(1), "own": SimpleMapper()}, tmp_path / "own.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        SimpleMapper.load_file(tmp_path / "own.pt")
    for asked in (False, None):
        with pytest.raises(ValueError, match=rf"weights_only={asked}: torch.load a file you trust"):
            SimpleMapper.load_file(tmp_path / "own.pt", weights_only=asked)


def test_bert_and_longformer_have_our_parameters():
    ours = encoder(final_normalization=False)
    values = {name: torch.rand(1) for name in ours.state_dict()}
    back = {here: there for there, here in BERT.items()}
    renamed = {}
    for name, value in values.items():
        _, layer, rest = name.split(".", 2)
        part, _, kind = rest.rpartition(".")
        renamed[f"layer.{layer}.{back[part]}.{kind}"] = value
    assert HugginfaceBertEncoderMapper().map(renamed) == values
    of_longformer = renamed | {"layer.1.attention.self.query_global.weight": torch.rand(1)}
    assert LongformerMapper().map(of_longformer) == values
    other = {"embeddings.weight": torch.rand(1)}
    assert HugginfaceBertEncoderMapper().map(other) == LongformerMapper().map(other) == other


def test_a_mapper_leaves_another_one_as_it_was():
    rules = [RegexRule("^a", "b")]
    SimpleMapper(rules)
    assert len(rules) == 1
    assert SimpleMapper(rules, add_identity=False).map({"ab": 1, "c": 2}) == {"bb": 1}
    assert SimpleMapper(rules).map({"ab": 1, "c": 2}) == {"bb": 1, "c": 2}
    assert SimpleMapper().map({"c": 2}) == {"c": 2}


def test_rules():
    to_b, doubled = RegexRule("a", "b"), RegexRule("x", lambda found: found[0] * 2)
    assert to_b.apply("aca", 1) == [("bcb", 1)]
    assert doubled.apply("x", 1) == [("xx", 1)]
    assert IdentityRule().apply("x", 1) == [("x", 1)]
    assert IdentityRule().matches("x")
    assert not NotRule(to_b).matches("a")
    assert NotRule(to_b).apply("c", 1) == [("c", 1)]
    either = OrRule(to_b, doubled)
    assert [either.matches(key) for key in ("a", "x", "c")] == [True, True, False]
    assert either.apply("ax", 1) == [("bxx", 1)]
    three = PytorchAttentionWeightsRule().apply("self_attn.in_proj_bias", torch.arange(6))
    assert [(key, value.tolist()) for key, value in three] == [
        ("attention.query_projection.bias", [0, 1]),
        ("attention.key_projection.bias", [2, 3]),
        ("attention.value_projection.bias", [4, 5]),
    ]
    split = OrRule(PytorchAttentionWeightsRule(), RegexRule("query", "q"))
    assert split.apply("self_attn.in_proj_bias", torch.arange(3))[0][0] == "attention.q_projection.bias"


@pytest.mark.parametrize("options", [{}, {"feature_map": Favor.factory(8)}])
def test_a_mirror_shares_parameters(options):
    model = encoder(attention_type="causal-linear", **options)
    rnn = encoder(RecurrentEncoderBuilder, attention_type="linear", **options)
    make_mirror(model, rnn)
    for one, other in zip(model.parameters(), rnn.parameters(), strict=True):
        assert one is other
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    x, state = torch.rand(2, 4, 8, dtype=torch.float64), None
    whole = model(x, TriangularCausalMask(4))
    for t in range(4):
        y, state = rnn(x[:, t], state)
        assert_close(y, whole[:, t], **EXACT)


def test_a_mirror_needs_the_same_modules():
    with pytest.raises(AttributeError, match="layers"):
        make_mirror(encoder(), nn.Linear(1, 1))

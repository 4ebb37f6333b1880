"""What is written for the runtime, and what is refused."""

import copy
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from lintra.attention import delta, linear, performer, retention, softmax, ssd
from lintra.checkpoint import Error
from lintra.export import runtime as export
from lintra.models import decoder, encoder
from lintra.nn import MLP
from lintra.nn.block import Block
from lintra.nn.distributions import Categorical
from tests.generation.test_sampling import build_seq2seq
from tests.kinds import build
from tests.runtime.kinds import KINDS


class Other(Block):
    """A user's block."""


class Odd(Categorical):
    """A user's distribution."""


def changed(change, **kind):
    model = build(**kind)
    with torch.no_grad():
        change(model)
    return model


def other_block(model):
    model.blocks[0].__class__ = Other


def other_embedding(model):
    model.embedding.table = nn.Embedding(6, 36, max_norm=1.0)
    model.embedding.table.__class__ = type("Louder", (nn.Embedding,), {})


def loud_norms(model):
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e39


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (build_seq2seq(), "does not read another sequence"),
        (
            encoder.Config(vocabulary=5, layers=1, heads=1, width=8).build(),
            "is for decoders and recognisers of speech, got Encoder",
        ),
        (
            build(attention=performer.Config()),
            "knows the attentions linear, retention, rfa, gated, delta, kda, ssd and softmax, got performer",
        ),
        (build(attention=softmax.Config(scale=-1.0)), r"multiplies scores with at least 0, got scale=-1\.0"),
        (
            build(attention=softmax.Config(window=2**24 + 1)),
            "takes window of at most 16,777,216, got 16,777,217",
        ),
        (build(attention=linear.Config(eps=1e39)), r"takes eps of at most 3\.4\d*e\+38, got 1e\+39"),
        (build(attention=(linear.Config(), linear.Config(eps=1e39))), "takes eps of at most"),
        (build(attention=softmax.Config(scale=1e39)), r"takes scale of at most 3\.4\d*e\+38, got 1e\+39"),
        (changed(loud_norms), "takes eps of norms of at most"),
        (build(heads=1, head_dim=2**17), "takes head_dim of at most 65,536, got 131,072"),
        (
            build(attention=(linear.Config(), performer.Config())),
            "knows the attentions linear, .* and softmax, got performer",
        ),
        (
            build(attention=tuple(softmax.Config(window=w) for w in range(1, 18)), layers=17),
            "takes kinds of layers of at most 16, got 17",
        ),
        (
            build(attention=linear.Config(feature_map=linear.Hedgehog())),
            "knows identity, elu.1, relu, squared relu, got Hedgehog",
        ),
        (
            build(attention=retention.Config(centre_heads=True)),
            "divides heads by their root mean square, got centre_heads=True",
        ),
        (
            build(attention=delta.Config(), conv=2),
            "has one convolution: delta has its own, got conv=2",
        ),
        (
            build(attention=delta.Config(), qk_norm="l2"),
            "makes keys unit vectors once, behind a convolution, got qk_norm='l2'",
        ),
        (
            build(attention=retention.Config(), output_gate=True),
            "has one norm and gate of heads: retention has its own, got output_gate=True",
        ),
        (
            build(attention=linear.Config(rotary="inputs"), position="rotary"),
            "the runtime turns the features of linear, got rotary='inputs'",
        ),
        (build(activation="gelu_tanh"), "does not know the activation 'gelu_tanh'"),
        (changed(other_block), "does not know Other with AttentionLayer"),
        (changed(other_embedding), "does not know Louder"),
        (
            changed(lambda model: model.head.register_forward_hook(print)),
            "would pass over the hooks of Linear",
        ),
        (changed(lambda model: setattr(model, "output", Odd(5, 5))), "does not know the distribution Odd"),
        (
            changed(lambda model: setattr(model.blocks[1], "mlp", MLP(36, ratio=2))),
            "layers that are alike",
        ),
        (changed(lambda model: setattr(model.norm, "eps", 1e-2)), "norms must have the same eps"),
        (changed(lambda model: setattr(model, "norm", nn.RMSNorm(36))), "norms must have weights and an eps"),
        (
            changed(lambda model: setattr(model, "norm", nn.RMSNorm(36, eps=1e-5))),
            "norms must all be LayerNorm, or all RMSNorm",
        ),
        (
            changed(lambda model: model.head.weight[1, 1].fill_(torch.nan)),
            "head.weight holds numbers that are",
        ),
        (changed(lambda model: model.head.bias[1].fill_(torch.inf)), "head.bias holds numbers that are"),
        (build(position="grid", grid=(1,) * 9), "takes axes of at most 8, got 9"),
        (build(context=tuple(range(1, 34))), "takes places of at most 32, got 33"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_runtime_does_not_know(model, reason):
    with pytest.raises(ValueError, match=f"cannot be exported to the runtime: .*{reason}"):
        export.to_bytes(model)


def test_weights_that_do_not_fit():
    model = build()
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"weights must fit into float16, got 1e\+06: keep float32"):
        export.to_bytes(model, "float16")
    export.to_bytes(model, "int8")
    with torch.no_grad():
        model.embedding.table.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="weights must fit into float16"):
        export.to_bytes(model, "int8")
    with pytest.raises(ValueError, match="weights must be one of float32, float16, int8, got 'int4'"):
        export.to_bytes(model, "int4")


def loud_decay(model):
    model.blocks[0].attn.attention.A_log[0] = 89.0  # exp(89) is beyond float32


def loud_weight(model):
    model.double().head.weight[0, 0] = 1e39


@pytest.mark.parametrize("weights", export.WEIGHTS)
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (changed(loud_decay, attention=ssd.Config()), "inf"),
        (changed(loud_weight), r"1e\+39"),
    ],
    ids=["a rate of decay", "a weight in float64"],
)
def test_a_file_that_would_not_load_is_not_written(model, told, weights, tmp_path):
    """Some numbers are finite, but not in the stored type; an existing file stays."""
    assert export.why_not(model) is None
    (tmp_path / "model.lrt").write_text("before")
    with pytest.raises(ValueError, match=f"what a file holds must fit into float32, got {told}"):
        export.write(model, tmp_path / "model.lrt", weights)
    assert (tmp_path / "model.lrt").read_text() == "before"


@dataclass
class Sizes:
    """docs/format.md, counted independently: the number of bytes in the file of a plain model."""

    weights: str

    def of(self, rows, columns, weights=None):
        size = {"float32": 4, "float16": 2, "int8": 1}[weights or self.weights]
        scale = self.of(1, rows, "float32") if size == 1 else 0
        return -(-rows * (-(-columns // 16) * 16) * size // 64) * 64 + scale

    def plain(self, n, c, layers, hidden):
        vector = self.of(1, c, "float32")
        layer = 4 * vector + self.of(3 * c, c) + self.of(1, 3 * c, "float32") + self.of(c, c) + vector
        layer += self.of(hidden, c) + self.of(1, hidden, "float32") + self.of(c, hidden) + vector
        table = self.of(n + 1, c, "float32" if self.weights == "float32" else "float16")
        frequencies = -(-c // 2 * 8 // 64) * 64
        return (
            320 + table + frequencies + layers * layer + 2 * vector + self.of(n, c) + self.of(1, n, "float32")
        )


@pytest.mark.parametrize("weights", export.WEIGHTS)
def test_the_file_is_as_it_is_documented(weights):
    content = export.to_bytes(build(), weights)
    magic, version, checksum, size = struct.unpack_from("<8sIIQ", content)
    assert (magic, version, size) == (b"lintraRT", 1, len(content))
    assert checksum == zlib.crc32(content[16:])
    fields = struct.unpack_from("<10I", content, 24)
    assert fields == (export.WEIGHTS.index(weights), 5, 1, 2, 36, 3, 3, 0, 144, 0)
    assert len(content) == Sizes(weights).plain(5, 36, 2, 144)
    assert content == export.to_bytes(build(), weights)


def test_each_model_is_written_as_the_lowest_version_that_has_it():
    """Older programs can read it; they refuse later versions with a message."""
    for name, kind in KINDS.items():
        content = export.to_bytes(build(**kind))
        later = re.match("gated|delta|kda|ssd|convolved", name) is not None
        version = 3 if re.search("softmax|hybrid", name) else 1 + later
        assert struct.unpack_from("<I", content, 8)[0] == version, name
    assert struct.unpack_from("<I", export.to_bytes(build(head_dim=4)), 8)[0] == 2
    assert struct.unpack_from("<I", export.to_bytes(build(mlp_ratio=0.0)), 8)[0] == 2


def test_layers_of_one_kind_are_said_once():
    """One record for each kind after the first, then a byte for each layer."""
    kinds = linear.Config(), softmax.Config(window=7), linear.Config(), retention.Config()
    content = export.to_bytes(build(attention=kinds, layers=4))
    assert struct.unpack_from("<2I", content, 356) == (0, 3)  # no window; the kinds
    records = [content[384 + 128 * i : 512 + 128 * i] for i in range(2)]
    assert [struct.unpack_from("<I", record, 68)[0] for record in records] == [7, 0]
    assert [record[72:] for record in records] == [bytes(56)] * 2
    assert content[640:704] == bytes([0, 1, 0, 2]) + bytes(60)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    model = build()
    export.write(model, tmp_path / "a" / "model.lrt")
    assert (tmp_path / "a" / "model.lrt").read_bytes() == export.to_bytes(model)
    (tmp_path / "file").write_text("")
    with pytest.raises(Error, match="cannot be written"):
        export.write(model, tmp_path / "file" / "model.lrt")
    with pytest.raises(ValueError, match="int4"):
        export.write(model, tmp_path / "b.lrt", "int4")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a", "file"]


def test_an_embedding_of_levels_is_the_table_of_its_values():
    model = build(**KINDS["learned"])
    assert isinstance(model.config, decoder.Config)
    content = export.to_bytes(model)
    table = torch.frombuffer(bytearray(content[320 : 320 + 6 * 48 * 4]), dtype=torch.float32).view(6, 48)
    torch.testing.assert_close(table[:, :36], model.embedding(torch.arange(6)[None])[0], rtol=0, atol=0)


def test_the_documented_header_is_the_header():
    """Its rows are contiguous, and name as many words as are written."""
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    table = re.search(r"`lintraRT` \|.*?\n\n", text, re.DOTALL)
    assert table is not None
    assert documented(table[0], 8) == export.HEADER[3]
    record = re.search(r"^\| 0 \| 12 \| heads h.*?\n\n", text, re.DOTALL | re.MULTILINE)
    assert record is not None
    assert documented(record[0], 0) == 128


def documented(table, end):
    """The end of the rows of a table; they must be contiguous from `end` on."""
    for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", table, re.MULTILINE):
        assert int(at) == end
        end += int(size)
    return end


@pytest.mark.parametrize("kind", ["ssd", "retention"])
def test_what_is_derived_from_16_bit_weights_is_not_rounded(kind):
    model = build(attention={"ssd": ssd, "retention": retention}[kind].Config()).eval().bfloat16()
    assert export.to_bytes(model) == export.to_bytes(copy.deepcopy(model).float())

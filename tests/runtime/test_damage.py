"""Damaged files and states give an error message, and never a crash."""

import re
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lintra import runtime
from lintra.attention import linear, softmax
from lintra.attention.softmax import SoftmaxAttention
from lintra.export import runtime as export
from lintra.runtime import Error, Model, Sequence, aligned
from tests.kinds import build
from tests.runtime import recognisers
from tests.runtime.kinds import KINDS

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

FIELD = {  # offsets in the header, docs/format.md
    "weights": 24,
    "vocabulary": 28,
    "start": 32,
    "layers": 36,
    "width": 40,
    "heads": 44,
    "kv_heads": 48,
    "rows": 52,
    "hidden": 56,
    "feed": 60,
    "norm place": 64,
    "norm kind": 68,
    "final norm": 72,
    "position": 76,
    "axes": 80,
    "axis": 84,
    "places": 116,
    "place": 120,
    "map": 248,
    "decay": 252,
    "denominator": 256,
    "head norm": 260,
    "head gate": 264,
    "output": 268,
    "components": 272,
    "eps": 276,
    "norm_eps": 280,
    "rest": 284,
    "input": 316,
    # Since version 2.
    "dim": 320,
    "conv": 324,
    "unit keys": 328,
    "update": 332,
    "decay rank": 336,
    "gate rank": 340,
    "skip": 344,
    "scale": 348,
    "beta scale": 352,
    "rest of version 2": 356,
    # Since version 3.
    "window": 356,
    "kinds": 360,
    "rest of version 3": 364,
}
OF_FRAMES = {  # in the second header, of models that read frames
    "inputs": 0,
    "subsampled": 4,
    "stages": 8,
    "bytes of names": 12,
    "spaced": 16,
    "audio": 20,
    "rate": 24,
    "frame": 28,
    "shift": 32,
    "low": 36,
    "high": 40,
    "rest of frames": 44,
}
KNOWN = ("weights", "start", "feed", "norm place", "norm kind", "final norm", "position", "map", "decay")
KNOWN += ("denominator", "head norm", "head gate", "output", "input")
KNOWN_IN_2 = ("decay", "head norm", "head gate", "unit keys", "update", "skip")


def content_of(weights="float32", **kind):
    return bytearray(export.to_bytes(build(**({"layers": 1} | kind)), weights))


def place(content, name):
    """The offset of a field in a file of either version."""
    return FIELD[name] if name in FIELD else header_of(content) + OF_FRAMES[name]


def header_of(content):
    return export.HEADER[struct.unpack_from("<I", content, 8)[0]]


def repaired(content):
    """The file with a correct checksum."""
    content = bytearray(content)
    struct.pack_into("<I", content, 12, zlib.crc32(content[16:]))
    return bytes(content)


def refused(content, reason):
    with pytest.raises(Error, match=re.escape(reason)):
        Model(bytes(content))


def with_word(content, at, value):
    content = bytearray(content)
    struct.pack_into("<f" if isinstance(value, float) else "<I", content, at, value)
    return repaired(content)


def test_what_is_no_model():
    content = content_of()
    for other in (b"", b"lintra", b"{}" * 500, b"lintraST" + content[8:]):
        refused(other, "it begins with other bytes")
    refused(with_word(content, 8, 4), "another version of the format")
    refused(content[:8], "shorter or longer than it must be")


def test_no_length_but_its_own():
    content = content_of()
    for size in (*range(12, 600), len(content) - 1):
        refused(content[:size], "shorter or longer than it must be")
        if size >= 24:
            told = content[:16] + struct.pack("<Q", size) + content[24:size]
            refused(repaired(told), "shorter or longer than it must be")
    for more in (1, 64):
        longer = content + bytes(more)
        refused(longer, "shorter or longer than it must be")
        struct.pack_into("<Q", longer, 16, len(longer))
        refused(repaired(longer), "shorter or longer than it must be")


@given(place=st.integers(12, 10**9), bit=st.integers(0, 7))
def test_no_bit_may_flip(place, bit):
    content = content_of(width=12)
    place = 12 + place % (len(content) - 12)
    content[place] ^= 1 << bit
    reason = "shorter or longer than it must be" if 16 <= place < 24 else "its checksum differs"
    refused(content, reason)


@pytest.mark.parametrize("name", KNOWN)
def test_a_kind_of_a_later_version(name):
    for value in (7, 2**31, 2**32 - 1):
        refused(with_word(content_of(), FIELD[name], value), "a kind that this program does not know")


@pytest.mark.parametrize("name", KNOWN_IN_2)
def test_a_kind_of_a_version_after_2(name):
    for value in (5, 2**31, 2**32 - 1):
        content = with_word(content_of(**KINDS["delta"]), FIELD[name], value)
        refused(content, "a kind that this program does not know")


@pytest.mark.parametrize(("name", "value"), [("decay", 3), ("head norm", 2), ("head gate", 2)])
def test_a_kind_of_version_2_in_version_1(name, value):
    refused(with_word(content_of(), FIELD[name], value), "a kind that this program does not know")


def test_a_kind_of_version_3_in_version_2():
    for name, value in (("update", 3), ("window", 1), ("kinds", 1)):
        reason = "a kind that" if name == "update" else "where there must be zeros"
        refused(with_word(content_of(**KINDS["delta"]), FIELD[name], value), reason)


def test_a_file_of_one_version_as_another():
    refused(with_word(content_of(**KINDS["delta"]), 8, 1), "a kind that this program does not know")
    assert reason_of(with_word(content_of(), 8, 2)) is not None
    assert reason_of(with_word(content_of(**KINDS["softmax"]), 8, 2)) is not None
    assert reason_of(with_word(content_of(**KINDS["delta"]), 8, 3)) is not None
    short = bytearray(content_of()[:320])  # too short for the header of version 2
    struct.pack_into("<Q", short, 16, 320)
    refused(with_word(short, 8, 2), "shorter or longer than it must be")


SIZES = ("vocabulary", "layers", "width", "heads", "kv_heads", "rows", "hidden", "axes", "axis", "places")
SIZES += ("components",)


@pytest.mark.parametrize("kind", ["plain", "context", "rfa", "mixture", "kv_heads"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_hostile(kind, name):
    """Whatever a size claims: the largest values, and those whose products overflow 32 or 64 bits."""
    content = content_of(**KINDS[kind])
    right = struct.unpack_from("<I", content, FIELD[name])[0]
    for value in {0, 1, right + 1, 2 * right, 2**14, 2**16, 2**20, 2**24, 2**31, 2**32 - 1} - {right}:
        with pytest.raises(Error, match=r"a size that is out of bounds|shorter or longer than it must be"):
            Model(with_word(content, FIELD[name], value))


@pytest.mark.parametrize("kind", ["gated", "delta", "kda, low rank", "ssd", "convolved rfa"])
@pytest.mark.parametrize("name", [*SIZES, "dim", "conv", "decay rank", "gate rank"])
def test_sizes_of_version_2_that_are_hostile(kind, name):
    test_sizes_that_are_hostile(kind, name)


@pytest.mark.parametrize("kind", ["softmax, window", "hybrid"])
@pytest.mark.parametrize("name", [*SIZES, "dim", "conv", "decay rank", "gate rank", "kinds"])
def test_sizes_of_version_3_that_are_hostile(kind, name):
    if (kind, name) == ("hybrid", "layers"):  # with 3 layers, their kinds extend to where there must be zeros
        refused(with_word(content_of(**KINDS[kind]), FIELD[name], 3), "where there must be zeros")
    else:
        test_sizes_that_are_hostile(kind, name)


RECORD = {name: 4 * i for i, name in enumerate(("heads", "kv_heads", "rows", "map", "decay", "denominator"))}
RECORD |= {"head norm": 24, "head gate": 28, "eps": 32, "conv": 36, "unit keys": 40, "update": 44}
RECORD |= {"decay rank": 48, "gate rank": 52, "skip": 56, "scale": 60, "beta scale": 64, "window": 68}
TWO_KINDS = {"layers": 4, "width": 24, "heads": 2, "attention": (linear.Config(), softmax.Config())}
TWO_KINDS |= {"position": "none"}


def test_records_of_kinds_that_are_hostile():
    """Whatever a record claims about the second kind of layers."""
    content = content_of(**TWO_KINDS)
    assert struct.unpack_from("<3I", content, 384 + RECORD["heads"]) == (2, 2, 0)
    for name, at in RECORD.items():
        if name in ("eps", "scale", "beta scale"):
            for value in (float("nan"), float("inf"), -1.0):
                refused(with_word(content, 384 + at, value), "infinite, not a number, or out of bounds")
            continue
        right = struct.unpack_from("<I", content, 384 + at)[0]
        # Values that change no size and suit the others.
        harmless = {"unit keys": {1}, "head norm": {1}, "update": {0}}.get(name, set())
        harmless |= {1, 2**14, 2**16, 2**20, 2**24} if name == "window" else set()
        for value in {0, 1, right + 1, 2**14, 2**16, 2**20, 2**24, 2**31, 2**32 - 1} - {right} - harmless:
            with pytest.raises(
                Error, match=r"out of bounds|shorter or longer|kind that this|does not go with"
            ):
                Model(with_word(content, 384 + at, value))
        for value in harmless:
            Model(with_word(content, 384 + at, value))
    for at in range(384 + 72, 384 + 128, 4):
        refused(with_word(content, at, 1), "where there must be zeros")


def test_layers_of_kinds_that_are_none():
    content, layers = content_of(**TWO_KINDS), 384 + 128
    assert content[layers : layers + 4] == bytes([0, 1, 0, 1])
    for numbers, reason in (
        ((0, 2, 0, 1), "a size that is out of bounds"),
        ((0, 255, 0, 1), "a size that is out of bounds"),
        ((0, 0, 0, 0), "a size that is out of bounds"),  # no layer has the second kind
        ((1, 1, 1, 1), "a size that is out of bounds"),
    ):
        content[layers : layers + 4] = bytes(numbers)
        refused(repaired(content), reason)
    other = content_of(**KINDS["hybrid"])
    assert other[layers : layers + 4] == bytes([0, 0, 0, 1])
    other[layers : layers + 4] = bytes([0, 1, 0, 1])  # shorter layers
    refused(repaired(other), "shorter or longer than it must be")
    content[layers : layers + 5] = bytes([0, 1, 0, 1, 1])
    refused(repaired(content), "where there must be zeros")
    for size in range(384, layers + 64):  # too short for the table of the kinds of layers
        told = content[:16] + struct.pack("<Q", size) + content[24:size]
        refused(repaired(told), "shorter or longer than it must be")


def test_how_far_back_a_place_may_lie():
    content = content_of(**KINDS["context"])
    for value in (0, 2**16 + 1, 2**32 - 1):
        refused(with_word(content, FIELD["place"], value), "a size that is out of bounds")
    farthest = Sequence(Model(with_word(content, FIELD["place"], 2**16)))
    farthest.prefill([5, 1, 2])


def test_all_sizes_at_their_largest():
    """The size of the file is computed in 64 bits."""
    content = content_of()
    for name, value in (("vocabulary", 2**24), ("layers", 2**12), ("width", 2**16), ("hidden", 2**20)):
        struct.pack_into("<I", content, FIELD[name], value)
    for heads in (1, 2**16):
        for name in ("heads", "kv_heads"):
            struct.pack_into("<I", content, FIELD[name], heads)
        refused(repaired(content), "shorter or longer than it must be")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plain", {"map": 4}),  # random features without rows
        ("plain", {"position": 3}),  # tables without an axis
        ("plain", {"output": 1}),  # a mixture without components
        ("nowhere", {"places": 1, "place": 1}),  # places before the first token, without a start symbol
        ("one", {"position": 1}),  # a code of an odd width
        ("gated", {"decay": 3}),  # a rank where heads fade as a whole
        ("gated", {"decay rank": 0}),  # no rank where every feature fades
        ("convolved rfa", {"decay": 4, "decay rank": 2}),  # decays of features that are random
        ("convolved rfa", {"denominator": 0, "decay": 0, "update": 1}),  # random features in the delta rule
        ("gated", {"denominator": 1}),  # a denominator where every feature fades
        ("kda", {"head gate": 0}),  # a rank without a gate
        ("delta", {"denominator": 1}),  # a denominator of the delta rule
        ("ssd", {"decay": 0}),  # a step without a decay
        ("softmax", {"map": 1}),  # features of keys that are kept as they are
        ("softmax", {"decay": 1}),
        ("softmax", {"denominator": 1}),
        ("softmax", {"skip": 1}),
        ("softmax", {"update": 0, "window": 3}),  # a window of a state of one size
        ("delta", {"heads": 2**16, "kv_heads": 2**16, "dim": 2**16}),  # 2^32 numbers
    ],
)
def test_kinds_that_do_not_go_together(kind, changes):
    content = content_of(**KINDS[kind])
    for name, value in changes.items():
        struct.pack_into("<I", content, FIELD[name], value)
    refused(repaired(content), "does not go with the others")


def test_numbers_that_are_none():
    content = content_of()
    later = content_of(**KINDS["delta"])
    for name in ("eps", "norm_eps", "scale", "beta scale"):
        for value in (float("nan"), float("inf"), -1.0):
            changed = with_word(later if "scale" in name else content, FIELD[name], value)
            refused(changed, "infinite, not a number, or out of bounds")


@pytest.mark.parametrize("weights", export.WEIGHTS)
@pytest.mark.parametrize("kind", ["plain", "kda", "ssd", "gated", "two kinds"])
def test_weights_that_are_none(kind, weights):
    """Wherever they stand: each number of the file is made infinite or NaN, 64 of them at once."""
    small = {"layers": 2, "width": 8, "heads": 1, "vocabulary": 3, "position": "none"}
    content = content_of(weights, **(TWO_KINDS if kind == "two kinds" else KINDS[kind]) | small)
    begin = {"plain": 320, "two kinds": 384 + 128 + 64}.get(kind, 384)
    sections = range(begin, len(content), 64)
    found = 0
    for at in sections:
        for value in (0x7F800000, 0x7FC00001, 0xFF800000):
            reason = reason_of(with_word(content, at, value))
            assert reason is None or re.search("infinite, not a number|must be zeros", reason)
            found += reason is not None
    # All but 8-bit integers, every value of which is valid.
    assert found == 3 * len(sections) if weights != "int8" else 0 < found < 3 * len(sections)


def reason_of(content):
    """The reason why a file is refused; None if it is not."""
    try:
        Model(content)
    except Error as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["delta", "kda", "ssd", "gated"])
def test_rates_below_0(kind):
    """States would grow without bound."""
    model = build(**({"layers": 1} | KINDS[kind]))
    attention = model.blocks[0].attn.attention
    rate = 0.5 if kind == "gated" else attention.A_log.exp()[0].item()
    content = bytearray(export.to_bytes(model))
    at = next(at for at in range(384, len(content), 64) if struct.unpack_from("<f", content, at)[0] == rate)
    struct.pack_into("<f", content, at, -rate)
    refused(repaired(content), "infinite, not a number, or out of bounds")


@pytest.mark.parametrize("kind", ["retention", "plain"])
def test_rates_out_of_bounds(kind):
    """Decays are at most 1, and angles at most 1 radian per token."""
    content = content_of(**({"position": "sinusoidal"} | KINDS[kind]))
    places = [at for at in range(320, len(content) - 8, 4) if rate_at(content, at, kind)]
    assert places
    for value in (1.5, -0.5):
        changed = bytearray(content)
        struct.pack_into("<f" if kind == "retention" else "<d", changed, places[0], value)
        refused(repaired(changed), "infinite, not a number, or out of bounds")


def rate_at(content, at, kind):
    """Whether the first decay of a layer, or the first angle, is at this offset."""
    if kind == "retention":
        return struct.unpack_from("<f", content, at)[0] == pytest.approx(1 - 2**-5, rel=1e-7)
    return at % 64 == 0 and struct.unpack_from("<d", content, at)[0] == 1.0


def test_padding_holds_nothing():
    content = content_of(width=12, heads=1)  # rows of 12 numbers, padded to 16
    for at in (FIELD["rest"], 315, 320 + 12 * 4, len(content) - 1):
        changed = bytearray(content)
        changed[at] = 1
        refused(repaired(changed), "where there must be zeros")
    later = content_of(**KINDS["delta"])
    for at in (FIELD["rest"], 315, FIELD["rest of version 2"], 383, len(later) - 1):
        changed = bytearray(later)
        changed[at] = 1
        refused(repaired(changed), "where there must be zeros")


def test_a_file_by_its_name(tmp_path):
    with pytest.raises(Error, match=r"none.lrt cannot be read: No such file"):
        Model.open(tmp_path / "none.lrt")
    (tmp_path / "x.lrt").write_text("x")
    with pytest.raises(Error, match=r"x.lrt: this is no model for the runtime"):
        Model.open(tmp_path / "x.lrt")
    (tmp_path / "y.lrt").write_bytes(content_of())
    assert Model.open(tmp_path / "y.lrt").facts["width"] == 36


def test_memory_that_does_not_do():
    content = content_of()
    model = Model(bytes(content))
    library, address, memory = model.library, model.content.ctypes.data, model.memory.ctypes.data
    sequence = Sequence(model)

    def error(code):
        return library.lrt_error(code).decode()

    size = library.lrt_model_size()
    assert "multiple of 64" in error(library.lrt_load(memory, size, address + 4, len(content) - 4))
    assert "multiple of 64" in error(library.lrt_load(memory + 8, size, address, len(content)))
    assert "too small" in error(library.lrt_load(memory, 8, address, len(content)))
    size = library.lrt_sequence_size(memory)
    assert "too small" in error(library.lrt_start(sequence.address, size - 1, memory))
    assert "multiple of 64" in error(library.lrt_start(sequence.address + 4, size, memory))
    assert "shorter or longer" in error(
        library.lrt_save_state(sequence.address, address, model.state_size(0) - 1)
    )
    assert "out of bounds" in error(library.lrt_fact(memory, 99))
    assert error(0) == "nothing is wrong"
    assert error(1) == error(-99) == "there is no such error"


def test_states_that_are_none():
    model, other = Model(bytes(content_of(**KINDS["context"]))), Model(bytes(content_of(width=12)))
    sequence = Sequence(model)
    sequence.prefill([5, 1, 2])
    state, before = sequence.save(), sequence.save()

    def check(content, reason):
        with pytest.raises(Error, match=re.escape(reason)):
            sequence.load(bytes(content))
        assert sequence.save() == before

    check(b"", "no state of a sequence")
    check(b"lintraRT" + state[8:], "no state of a sequence")
    check(with_word(state, 8, 4), "another version of the format")
    for size in (8, 12, 63, 64, len(state) - 1):
        check(state[:size], "shorter or longer than it must be")
    check(state + b"\0", "shorter or longer than it must be")
    for at in range(12, len(state), 37):
        flipped = bytearray(state)
        flipped[at] ^= 4
        check(flipped, "shorter or longer" if 16 <= at < 24 else "its checksum differs")
    check(Sequence(other).save(), "the state is of another model")
    longer = bytearray(state + bytes(64))
    struct.pack_into("<Q", longer, 16, len(longer))
    check(repaired(longer), "the state is of another model")
    check(with_word(state, 28, 21), "no position for so many tokens")  # of 20
    check(with_word(state, 64, 6), "a token is no symbol of the model")
    check(with_word(state, 64 + 4 * 4, 1), "where there must be zeros")  # after four recent tokens
    check(with_word(state, 40, 1), "where there must be zeros")
    for value in (float("nan"), float("inf")):
        check(with_word(state, 128, value), "infinite, not a number")
    sequence.load(state)
    assert sequence.seen == 3


@pytest.mark.parametrize(
    ("kind", "features"), [("plain", 12), ("retention", 12), ("rfa", 20), ("delta", 12), ("ssd", 12)]
)
def test_padding_of_a_state_holds_nothing(kind, features):
    """All other numbers may be changed: as many as docs/format.md says that the sums hold."""
    model = build(**({"layers": 2} | KINDS[kind]))
    sequence = Sequence(Model(export.to_bytes(model)))
    sequence.prefill([0, 1, 2])
    state, taken, reasons = sequence.save(), 0, set()
    for at in range(64, len(state), 4):
        try:
            sequence.load(with_word(state, at, 0.5))
            taken += 1
        except Error as error:
            reasons.add(str(error))
    assert reasons == {"it holds something where there must be zeros"}
    mix = model.blocks[0].attn
    sums = mix.attention.rates if kind == "retention" else mix.kv_heads  # retention has a sum for each rate
    if kind in ("delta", "ssd"):  # no sum of keys, but the last inputs of the convolution
        assert taken == 2 * (sums * features * mix.dim + 3 * sum(mix.widths))
    else:
        assert taken == 2 * sums * (features * (mix.dim + 1) + 1)


@pytest.mark.parametrize("kind", ["softmax", "softmax, window", "hybrid"])
def test_states_of_softmax_that_are_none(kind):
    """Every number of a key or value may be changed, and nothing else in the state."""
    model = build(**KINDS[kind])
    runtime_model, sequence = Model(export.to_bytes(model)), Sequence(Model(export.to_bytes(model)))
    sequence.prefill([0, 1, 2])
    state = sequence.save()
    kept = [block.attn for block in model.blocks if isinstance(block.attn.attention, SoftmaxAttention)]
    rows = sum(2 * 3 * attn.kv_heads for attn in kept)
    begin, step = len(state) - 4 * rows * -(-kept[0].dim // 16) * 16, 4 * -(-kept[0].dim // 16) * 16
    for at in range(begin, len(state), 4):
        changed = with_word(state, at, 0.5)
        if (at - begin) % step < 4 * kept[0].dim:
            sequence.load(changed)
            for value in (float("nan"), float("-inf")):
                with pytest.raises(Error, match="infinite, not a number"):
                    sequence.load(with_word(state, at, value))
        else:
            with pytest.raises(Error, match="where there must be zeros"):
                sequence.load(changed)
    sequence.load(state)
    for seen, reason in (
        (2, "the state is of another model"),
        (4, "the state is of another model"),
        (2**24, "the state is of another model"),
        (2**24 + 1, "no position for so many tokens"),
        (2**32 - 1, "no position for so many tokens"),
    ):
        if kind == "softmax, window" and seen > 2**16:
            reason = "the state is of another model"
        with pytest.raises(Error, match=reason):
            sequence.load(with_word(state, 28, seen))
        assert sequence.save() == state
    assert runtime_model.facts["positions"] == (-1 if kind == "softmax, window" else 2**24)


def test_a_sequence_that_is_full():
    """Its memory has room for so many tokens; it is copied to memory with more room, and with too little."""
    model = Model(bytes(content_of(**KINDS["hybrid"])))
    library, at, held = model.library, model.memory.ctypes.data, []

    def memory(tokens):
        held.append(aligned(library.lrt_sequence_size_for(at, tokens)))
        return held[-1].ctypes.data, len(held[-1])

    def saved(sequence, tokens):
        state = aligned(library.lrt_state_size_for(at, tokens))
        assert library.lrt_save_state(sequence, state.ctypes.data, len(state)) == 0
        return state.tobytes()

    def error(code):
        return library.lrt_error(code).decode()

    sizes = [library.lrt_sequence_size_for(at, tokens) for tokens in (0, 5, 7, 2**24, 2**32 - 1)]
    assert sizes == sorted(sizes)
    assert sizes[-2] == sizes[-1] == library.lrt_sequence_size(at)
    assert (
        library.lrt_state_size_for(at, 2**32 - 1)
        == library.lrt_state_size(at)
        > library.lrt_state_size_for(at, 9)
    )
    (five, size), right = memory(5), Sequence(model)
    assert error(library.lrt_start(five, sizes[0] - 1, at)) == error(-10)
    assert library.lrt_start(five, size, at) == 0
    room = library.lrt_room(five)
    assert 5 <= room < 16  # the padding of rows may hold a few more
    for token in range(room):
        assert library.lrt_step(five, token % 5) == 0
        right.step(token % 5)
    before = right.save()
    assert saved(five, room) == before
    assert "no room for so many tokens" in error(library.lrt_step(five, 0))
    words = np.zeros(2, np.uint32)
    assert "no room for so many tokens" in error(library.lrt_prefill(five, words.ctypes.data, 2))
    small, less = memory(room - 1)
    assert error(library.lrt_copy(small, less, five)) == error(-10)
    assert error(library.lrt_copy(small + 4, size, five)) == error(-9)
    more, size = memory(3 * room)
    assert library.lrt_copy(more, size, five) == 0
    assert library.lrt_room(more) >= 3 * room
    for token in (1, 2, 3):
        assert library.lrt_step(more, token) == 0
        right.step(token)
    after = right.save()
    assert saved(more, room + 3) == after
    assert "no room for so many tokens" in error(library.lrt_load_state(five, after, len(after)))
    assert saved(five, room) == before


@pytest.mark.parametrize("decay", [0.0, -0.0])
def test_a_state_of_decay_0_loads(decay):
    """As a rate, -0 is as good as 0, and it leaves no -0 in the padding (found by fuzzing)."""
    content = content_of(**KINDS["retention"])
    for at in [at for at in range(320, len(content) - 8, 4) if rate_at(content, at, "retention")]:
        struct.pack_into("<f", content, at, decay)
    sequence = Sequence(Model(repaired(content)))
    sequence.prefill([0, 1, 2])
    state = sequence.save()
    sequence.load(state)
    assert sequence.save() == state


def test_a_state_fits_the_weights_it_was_made_with():
    """Equal sizes are not enough."""
    model = build()
    one = Sequence(Model(export.to_bytes(model)))
    with torch.no_grad():
        model.head.bias[0] += 1
    with pytest.raises(Error, match="the state is of another model"):
        Sequence(Model(export.to_bytes(model))).load(one.save())


VERSIONS = ("four to one", "gated")  # recognisers, one for each version of the format


def recogniser(kind="four to one", **changes):
    return bytearray(export.to_bytes(recognisers.build(kind, **changes)))


@pytest.mark.parametrize("kind", VERSIONS)
def test_a_recogniser_of_any_other_length(kind):
    content = recogniser(kind)
    for size in range(320, 600):
        told = content[:16] + struct.pack("<Q", size) + content[24:size]
        refused(repaired(told), "shorter or longer than it must be")


@pytest.mark.parametrize("kind", VERSIONS)
@pytest.mark.parametrize("name", ["spaced", "audio", "input"])
def test_a_kind_of_frames_of_a_later_version(kind, name):
    content = recogniser(kind)
    for value in (2, 2**32 - 1):
        changed = with_word(content, place(content, name), value)
        refused(changed, "a kind that this program does not know")


def test_a_recogniser_of_one_version_as_another():
    assert [header_of(recogniser(kind)) for kind in VERSIONS] == [320, 384]
    for kind, other in zip(VERSIONS, (2, 1), strict=True):
        assert reason_of(with_word(recogniser(kind), 8, other)) is not None
    short = bytearray(recogniser("gated")[:384])  # too short for the header of frames
    struct.pack_into("<Q", short, 16, 384)
    refused(repaired(short), "shorter or longer than it must be")


@pytest.mark.parametrize("kind", ["four to one", "frames as they are", "learned", "gated"])
@pytest.mark.parametrize(
    "name", ["inputs", "subsampled", "stages", "bytes of names", "rate", "frame", "shift"]
)
def test_sizes_of_frames_that_are_hostile(kind, name):
    """At an unchanged file size, another rate or frame length within bounds is accepted."""
    content = recogniser(kind)
    right = struct.unpack_from("<I", content, place(content, name))[0]
    harmless = {"rate": {2**14, 2**16, 2**20, 2**24}, "frame": {2**14}, "shift": {1}}.get(name, set())
    harmless |= {right + 1, 2 * right} if name in ("rate", "frame") else {right + 1, 2 * right} - {201, 400}
    for value in {0, 1, right + 1, 2 * right, 2**14, 2**16, 2**20, 2**24, 2**31, 2**32 - 1} - {right}:
        reason = reason_of(with_word(content, place(content, name), value))
        if reason is None:
            assert kind != "frames as they are"
            assert value in harmless
        else:
            assert re.search(
                r"a size that is out of bounds|shorter or longer|names of the symbols|must be", reason
            )


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("four to one", {"start": 1}),
        ("four to one", {"places": 1, "place": 1}),
        ("four to one", {"output": 1, "components": 1}),
        ("four to one", {"vocabulary": 1}),
        ("four to one", {"input": 0}),
        ("frames as they are", {"subsampled": 6}),
        ("frames as they are", {"low": 1.0}),
        ("four to one", {"low": 4_000.0}),
        ("four to one", {"high": 4_000.5}),
        ("four to one", {"shift": 201}),
        ("four to one", {"audio": 0}),
        ("gated", {"start": 1}),
        ("gated", {"shift": 201}),
    ],
)
def test_frames_that_do_not_go_together(kind, changes):
    content = recogniser(kind)
    for name, value in changes.items():
        content = bytearray(with_word(content, place(content, name), value))
    assert reason_of(bytes(content)) is not None


@pytest.mark.parametrize("kind", VERSIONS)
def test_bounds_in_hz_that_are_none(kind):
    content = recogniser(kind)
    for name in ("low", "high"):
        for value in (float("nan"), float("inf"), -1.0):
            changed = with_word(content, place(content, name), value)
            refused(changed, "infinite, not a number, or out of bounds")
    for name in ("rest", "rest of frames"):
        refused(with_word(content, place(content, name), 1), "where there must be zeros")


@pytest.mark.parametrize("kind", VERSIONS)
def test_names_that_are_not_as_many(kind):
    content = recogniser(kind)
    names = "\0".join(recognisers.CHARACTERS.names).encode() + b"\0"
    at = content.index(names)
    for changed in (
        names.replace(b"\0", b"\1"),  # none ends
        names[:1] + b"b" + names[2:],  # one fewer
        names[:2] + b"\0" + names[3:],  # an empty one
        b"\0" + names[1:],
        names[:-1] + b"b",  # the last does not end
    ):
        assert len(changed) == len(names)
        other = content[:at] + changed + content[at + len(names) :]
        refused(repaired(other), "the names of the symbols are more or fewer")


@pytest.mark.parametrize("kind", ["two to one", "delta"])
def test_weights_of_frames_that_are_none(kind):
    content = recogniser(kind)
    sections = range(header_of(content) + 64, len(content), 64)
    for at in sections:
        for value in (0x7F800000, 0x7FC00001):
            reason = reason_of(with_word(content, at, value))
            assert reason is not None
            assert re.search("infinite, not a number|must be zeros|names of the symbols", reason)


@pytest.mark.parametrize("kind", VERSIONS)
def test_states_of_recognisers_that_are_none(kind):
    model = Model(bytes(recogniser(kind)))
    sequence = Sequence(model)
    sequence.read(np.ones((4, 10), np.float32))
    state = sequence.save()
    edges = len(state) - 4 * 2 * 16  # of two stages, the last of which has 12 numbers
    for at, value, reason in (
        (40, 2, "a token is no symbol"),  # an end that is neither
        (44, 5, "a token is no symbol"),
        (48, 1, "where there must be zeros"),
        (edges, float("nan"), "infinite, not a number"),
        (edges + 4 * 10, 1.0, "where there must be zeros"),
        (len(state) - 4, 1.0, "where there must be zeros"),
    ):
        with pytest.raises(Error, match=reason):
            sequence.load(with_word(state, at, value))
        assert sequence.save() == state
    for at in (edges, edges + 4 * 9, edges + 4 * 16, edges + 4 * 27):
        sequence.load(with_word(state, at, 0.5))

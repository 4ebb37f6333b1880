"""Tensors in several files: the same tensors, small files, and errors that name damage."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lintra.io import tensors
from lintra.io.tensors import Error, read_tensors, write_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def make(sizes):
    return {f"x{i}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes)}


@pytest.fixture
def in_parts(tmp_path, monkeypatch):
    """Three tensors of 40 bytes, in files of at most 80 bytes."""
    monkeypatch.setattr(tensors, "PART", 80)
    write_tensors(make([10, 10, 10]), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@given(sizes=st.lists(st.integers(0, 30), max_size=8))
def test_what_is_written_is_read(sizes, tmp_path_factory):
    folder, given = tmp_path_factory.mktemp("parts"), make(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "PART", 80)
        write_tensors(given, folder / "model.safetensors")
    found = read_tensors(folder / "model.safetensors")
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], x) for name, x in given.items())
    for file in folder.glob("*.safetensors"):
        held = load_file(file).values()
        assert len(held) <= 1 or sum(x.nbytes for x in held) <= 80


def test_a_transposed_tensor_is_written_in_order(tmp_path):
    x = torch.arange(6).view(2, 3).T
    write_tensors({"x": x}, tmp_path / "model.safetensors")
    assert torch.equal(read_tensors(tmp_path / "model.safetensors")["x"], x)


def test_names_and_index(in_parts):
    assert sorted(x.name for x in in_parts.parent.iterdir()) == [FIRST, SECOND, INDEX]
    index = json.loads(in_parts.with_name(INDEX).read_text())
    assert index["metadata"] == {"total_size": 120}
    assert index["weight_map"] == {"x0": FIRST, "x1": FIRST, "x2": SECOND}


def change_index(file, change):
    index = file.with_name(INDEX)
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))


def place(name, part):
    return lambda file: change_index(file, lambda content: content["weight_map"].update({name: part}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.with_name(SECOND).unlink(), f"{SECOND} does not exist"),
        (lambda f: f.with_name(FIRST).write_bytes(b"x"), f"{FIRST} is damaged or no"),
        (lambda f: change_index(f, lambda c: c.pop("weight_map")), "does not say in which parts"),
        (place("x0", "../secret.safetensors"), "does not say in which parts"),
        (place("x0", 3), "does not say in which parts"),
        (place("x9", SECOND), f"{SECOND} lacks tensor 'x9'"),
        (lambda f: f.with_name(INDEX).unlink(), "model.safetensors does not exist"),
    ],
)
def test_damage_is_named(in_parts, damage, message):
    damage(in_parts)
    with pytest.raises(Error, match=message):
        read_tensors(in_parts)

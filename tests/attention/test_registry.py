"""Mechanisms of other packages: found by an entry point or by class; named where they cannot be used."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lintra import attention, checkpoint, generation
from lintra.cli import main
from lintra.config import registry
from lintra.models import decoder

MODULE = '''
"""The mean of the values so far."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from lintra.attention import Attention, Capabilities


@dataclass(frozen=True, kw_only=True)
class Config:
    """Mean attention."""

    power: float = 1.0

    def build(self, **shape):
        return Mean(self, **shape)


class MeanState(NamedTuple):
    total: torch.Tensor
    count: torch.Tensor


class Mean(Attention):
    """The mean of the values so far."""

    paper = "none"
    can = Capabilities(
        causal=True, bidirectional=False, cross=False, recurrent=True, state="constant", cost="O(t d)"
    )

    def start(self, batch, *, device=None, dtype=None):
        total = torch.zeros(batch, self.kv_heads, self.value_dim, device=device, dtype=dtype)
        return MeanState(total, total.new_zeros(batch))

    def _step(self, q, k, v, state):
        state = MeanState(state.total + v[:, 0], state.count + 1)
        mean = (state.total / state.count[:, None, None])[:, None]
        return mean.repeat_interleave(self.group, 2), state
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package of one module with these entry points for the duration of a test."""
    made = []

    def install(name: str, points: dict[str, str], code: str = MODULE) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key} = {value}" for key, value in points.items()]
        (about / "entry_points.txt").write_text("\n".join(["[lintra.attention]", *lines]) + "\n")
        made.append(name)
        registry.announced.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    monkeypatch.undo()
    for name in made:
        sys.modules.pop(name, None)
    registry.announced.cache_clear()


def test_an_entry_point_is_a_mechanism_like_the_others(package, capsys, tmp_path):
    """In the list of names, the command line, configurations, checkpoints and generation."""
    package("acme_mean", {"mean": "acme_mean"})
    assert "mean" in attention.names()
    assert main(["list"]) == 0
    assert "mean" in capsys.readouterr().out
    config = attention.load("mean").Config(power=2.0)
    assert attention.name_of(type(config)) == "mean"
    torch.manual_seed(0)
    model = decoder.Config(vocabulary=7, attention=config, layers=2, heads=2, width=8).build().eval()
    checkpoint.save(model, tmp_path / "model")
    again = checkpoint.load(tmp_path / "model")
    assert again.config == model.config
    tokens = torch.randint(0, 7, (2, 5))
    assert_close(again(tokens), model(tokens))
    found = generation.generate(model, tokens, steps=3, seed=0)
    assert torch.equal(found, generation.generate_reference(model, tokens, steps=3, seed=0))


@pytest.mark.parametrize("name", ["mean", "acme_mean:Config"])
def test_a_model_trains_with_it(package, name, tmp_path, monkeypatch, capsys):
    package("acme_mean", {"mean": "acme_mean"} if name == "mean" else {})
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "2", "--batch", "2", "--precision", "32", "--layers", "1", "--width", "16"]
    options = ["--attention-options", "power=3.0"]
    assert (
        main(["train", "digits", "--attention", name, *options, "--dir", "run", *small, "--heads", "2"]) == 0
    )
    assert checkpoint.load(tmp_path / "run").config.attention.power == 3.0
    assert main(["generate", "--model", "run", "--out", "image.png"]) == 0


def test_a_class_is_found_where_its_module_is_imported(package, tmp_path):
    package("acme_mean", {})
    import acme_mean  # pyright: ignore (written by the fixture)

    model = decoder.Config(vocabulary=7, attention=acme_mean.Config(), layers=1, heads=2, width=8).build()
    checkpoint.save(model, tmp_path / "model")
    assert checkpoint.load(tmp_path / "model").config == model.config
    del sys.modules["acme_mean"]
    with pytest.raises(checkpoint.Error, match="'acme_mean:Config' is in a module that this program has not"):
        checkpoint.load(tmp_path / "model")


def test_what_cannot_be_imported_is_named_and_the_others_are_listed(package, capsys):
    package("acme_broken", {"broken": "acme_broken"}, "import nothing_of_that_name\n")
    package("acme_mean", {"mean": "acme_mean"})
    assert main(["list"]) == 0
    printed = capsys.readouterr()
    assert "mean" in printed.out
    assert "linear" in printed.out
    assert "attention 'broken' (acme_broken of acme_broken) cannot be imported: ModuleNotFound" in printed.err
    with pytest.raises(ValueError, match=r"'broken' \(acme_broken of acme_broken\) cannot be imported"):
        attention.load("broken")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\n", "'odd' .* has no class Config"),
        ("class Config: pass\n", "acme_odd must define one subclass of Attention, got 0"),
    ],
)
def test_a_module_that_is_no_mechanism_is_named(package, code, message):
    package("acme_odd", {"odd": "acme_odd"}, code)
    with pytest.raises(ValueError, match=message):
        attention.mechanism("odd")
    assert "odd" in attention.broken()


def test_two_mechanisms_of_one_name_are_both_named(package):
    package("acme_one", {"linear": "acme_one", "mean": "acme_one"})
    package("acme_two", {"mean": "acme_two"})
    for name, places in {
        "linear": ("lintra.attention.linear", "acme_one of acme_one"),
        "mean": ("acme_one of acme_one", "acme_two of acme_two"),
    }.items():
        with pytest.raises(ValueError, match=f"two mechanisms are called '{name}'") as raised:
            attention.load(name)
        assert all(place in str(raised.value) for place in places)
    assert {"linear", "mean"} <= set(attention.broken())


def test_the_shipped_mechanisms_have_their_files_names():
    for name in attention.names():
        assert attention.name_of(attention.load(name).Config) == name
    local = dataclasses.make_dataclass("Config", [])
    assert attention.name_of(local) is None
    assert Path(attention.load("linear").__file__).stem == "linear"

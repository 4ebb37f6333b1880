"""Programs written for the library find it under its name once `install()` has been called."""

import argparse
import subprocess
import sys
from pkgutil import walk_packages

import pytest
from torch import nn

import lintra.compat.fast_transformers as ours

REFUSED = [
    "aggregate",
    "causal_product",
    "causal_product.causal_product_cpu",
    "clustering.hamming",
    "hashing",
    "local_product",
    "sparse_product",
]


def run(program: str) -> str:
    """The output of a new interpreter, since an import cannot be undone."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_module_is_found_under_its_name_there():
    names = [
        x.name.removeprefix(f"{ours.__name__}.") for x in walk_packages(ours.__path__, f"{ours.__name__}.")
    ]
    public = [x for x in names if not any(part.startswith("_") for part in x.split("."))]
    assert {"attention.attention_layer", "builders.transformer_builders", "masking"} <= set(public)
    program = f"""
import importlib
import lintra.compat.fast_transformers as ours
ours.install()
ours.install()
import fast_transformers
assert fast_transformers is ours and fast_transformers.__version__ == "0.4.0"
for name in {public}:
    found = importlib.import_module("fast_transformers." + name)
    assert found is importlib.import_module(ours.__name__ + "." + name), name
    parent, _, last = ("fast_transformers." + name).rpartition(".")
    assert getattr(importlib.import_module(parent), last) is found, name
"""
    run(program)


def test_the_helper_that_recurrent_attentions_of_users_import_is_where_it_was():
    program = """
import warnings
from lintra.compat.fast_transformers import install
install()
from fast_transformers.recurrent._utils import check_state
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(check_state("new", memory="old"), check_state(memory="old"), len(caught), caught[0].message)
"""
    assert run(program) == "new old 2 memory is the deprecated name of state: pass state\n"


@pytest.mark.parametrize(
    "module", [ours.attention, ours.recurrent.attention, ours.recurrent.transformers, ours.transformers]
)
def test_classes_leave_names_to_those_that_derive_from_them(module):
    """`self.end = nn.Linear(...)` in a derived class would be hidden by a method `end`."""
    for name in module.__all__:
        taken = {x for x in dir(getattr(module, name)) if not x.startswith("_")}
        assert taken <= set(dir(nn.Module)), name


def test_private_kernels_are_refused_in_words():
    program = f"""
import importlib
from lintra.compat.fast_transformers import install
install()
for name in {REFUSED}:
    try:
        importlib.import_module("fast_transformers." + name)
    except ImportError as error:
        print(error)
try:
    from fast_transformers import sparse_product
except ImportError as error:
    print(error)
"""
    lines = run(program).splitlines()
    assert len(lines) == len(REFUSED) + 1
    for name, line in zip([*REFUSED, "sparse_product"], lines, strict=True):
        part = name.partition(".")[0]
        assert line.startswith(
            f"fast_transformers.{part} is not covered by lintra.compat.fast_transformers: "
        )


def test_nothing_is_installed_by_an_import():
    program = "import lintra.compat.fast_transformers, sys; print('fast_transformers' in sys.modules)"
    assert run(program) == "False\n"


def test_install_does_not_replace_the_real_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_transformers", argparse)
    with pytest.raises(RuntimeError, match=r"install\(\) must come first"):
        ours.install()

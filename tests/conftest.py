"""Fixtures for tests in several folders."""

import os
import signal
import sys
from importlib import import_module

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # the setting is read when lintra and Triton are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lintra import native

pytest.register_assert_rewrite("lintra.testing.laws")  # so that a failing law shows its values

settings.register_profile("lintra", deadline=None, derandomize=True)
settings.load_profile("lintra")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("LINTRA_EXPECT_NATIVE") and not native.available():
    raise RuntimeError(f"the native library was expected here: {native.why_not()}")


@pytest.fixture(autouse=True)
def seeded_anew():
    """Have what a test draws from the global generator not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread(monkeypatch):
    """On one CPU thread: sums come out in one order, and tiny operations do not wait for other threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fallback_module(monkeypatch):
    """Import transformers' module of a model by name, anew, with its functions in PyTorch, not a package's.

    A module binds these on import, so that one that another test left behind may hold those of a package.
    """
    pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[dev]')")
    for package in ("fla", "causal_conv1d", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, package, None)

    def load(name):
        path = f"transformers.models.{name}.modeling_{name}"
        monkeypatch.setitem(sys.modules, path, None)  # restored after the test
        del sys.modules[path]
        return import_module(path)

    return load


@pytest.fixture(params=["native", "torch"])
def implementation(request):
    """With the native kernels, if they are available, and without them."""
    if request.param == "torch" and native.available():
        with native.use("off"):
            yield request.param
    else:
        yield request.param


@pytest.fixture(params=["baseline", "avx2", "avx512", "neon"])
def instruction_set(request):
    """Each build of the native kernels that this processor can run, in turn."""
    if request.param not in native.instruction_sets():
        pytest.skip(f"{request.param} cannot run here")
    with native.use(request.param):
        yield request.param

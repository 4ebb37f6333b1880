"""Tests of Triton kernels: Triton's interpreter if there is no GPU, and buffers full of NaN."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def filled_with_nan(*arguments, **options):
    """A `torch.empty` that fills floating-point tensors with NaN."""
    x = torch.empty(*arguments, **options)
    return x.fill_(torch.nan) if x.is_floating_point() else x


class Patched:
    """A module with some of its names replaced, for code that imports it."""

    def __init__(self, module, **names):
        self.__dict__.update(module=module, names=names)

    def __getattr__(self, name):
        return self.names[name] if name in self.names else getattr(self.module, name)


@pytest.fixture(autouse=True)
def patient_interpreter(monkeypatch):
    """The interpreter sets up the language at every call of a jitted function: here once per module. It
    truncates float32 to bfloat16, and its rounding mode loses the carry; GPUs round, and so does PyTorch."""
    if DEVICE == "cuda":
        return
    from triton.runtime import interpreter

    prepared, convert = set(), interpreter._convert_float

    def rounded(x, source, target, mode):
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        return torch.from_numpy(x.view("float32").copy()).bfloat16().view(torch.uint16).numpy()

    def call(self, *arguments, **options):
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*arguments, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "_convert_float", rounded)

"""Tests of Triton kernels: Triton's interpreter if there is no GPU, buffers full of NaN, limits of errors."""

import pytest
import torch
from torch.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = 2.0**-23
TF32 = 2.0**-10


def limit(allowed, roundings, largest):
    """The largest error of the kernels in float32: twice that of the same formula in the same precision,
    `allowed`, plus so many roundings of the `largest` number: over few numbers the former may be 0 by luck.
    On a GPU exponentials (ex2.approx) and divisions are off by up to two units: twice the former and four
    times the latter."""
    gpu = DEVICE == "cuda"
    return (4 if gpu else 2) * allowed + (4 if gpu else 1) * roundings * FLOAT32 * largest


def as_if_compiled_alike(found, expected, **units):
    """Assert that two kernels computed the same. Those that read other dtypes are compiled apart, and a GPU's
    compiler may contract products and sums in other places: they are then equal to `units`, which are
    arguments of `assert_close`. The interpreter contracts nothing: there they are equal to the last bit."""
    assert_close(found, expected, **(units if DEVICE == "cuda" else {"rtol": 0, "atol": 0}))


def filled_with_nan(*arguments, **options):
    """A `torch.empty` that fills floating-point tensors with NaN."""
    x = torch.empty(*arguments, **options)
    return x.fill_(torch.nan) if x.is_floating_point() else x


def poison(monkeypatch, *modules):
    """Have all that these modules allocate for kernels filled with NaN, so that unwritten elements show."""
    names = {"empty": filled_with_nan, "empty_like": lambda x: torch.empty_like(x).fill_(torch.nan)}
    for module in modules:
        monkeypatch.setattr(module, "torch", Patched(torch, **names))


class Patched:
    """A module with some of its names replaced, for code that imports it."""

    def __init__(self, module, **names):
        self.__dict__.update(module=module, names=names)

    def __getattr__(self, name):
        return self.names[name] if name in self.names else getattr(self.module, name)


@pytest.fixture
def tf32(monkeypatch):
    """Have PyTorch allow TF32. The interpreter then cuts off the bits that TF32 lacks, as tensor cores do."""
    setting = torch.backends.cuda.matmul
    before = setting.allow_tf32
    if DEVICE != "cuda":
        from triton.runtime import interpreter

        multiply = interpreter.InterpreterBuilder.create_dot

        def shortened(x):
            return interpreter.TensorHandle((x.data.view("uint32") & 0xFFFFE000).view("float32"), x.dtype)

        def create_dot(self, a, b, total, precision, *others):
            if precision.name == "TF32":
                a, b = shortened(a), shortened(b)
            return multiply(self, a, b, total, precision, *others)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    setting.allow_tf32 = True
    yield
    setting.allow_tf32 = before


def close_in_tf32(found, expected, names):
    """Assert that results are off by at most 8 units of TF32, and the first, y, by more than float32 is.

    Random sums of about a hundred terms were off by up to 4 units of the largest number, after the three or
    four products that a gradient takes. The gradient of log_decay is a difference of sums of those of
    log_input."""
    sizes = [float(e.detach().abs().max()) for e in expected]
    if {"log_decay", "log_input"} <= set(names):
        i, j = names.index("log_decay"), names.index("log_input")
        sizes[i] = max(sizes[i], sizes[j])
    apart = [x.cpu().double() - e for x, e in zip(found, expected, strict=True)]
    errors = [float(x.detach().abs().max()) for x in apart]
    assert errors[0] > limit(0, 16, sizes[0])
    for name, error, size in zip(names, errors, sizes, strict=True):
        assert error <= 8 * TF32 * size, name


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

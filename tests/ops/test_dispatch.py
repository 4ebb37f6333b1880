"""Which implementation runs, and why another does not, for GPUs that this machine need not have."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from lintra import ops
from lintra.ops import dispatch

IN_TRITON = [op for op, names in dispatch.IMPLEMENTATIONS.items() if "triton" in names]


def as_if(monkeypatch, *, triton="3.7.1", capability=(9, 0), hip=None):
    """As if this machine had that GPU."""
    found = SimpleNamespace(name="the GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "_TRITON", triton)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.fixture
def on_gpu(monkeypatch):
    """The attributes of a float32 tensor [1 2 3 4] on a GPU that the dispatch reads."""
    monkeypatch.setattr(dispatch, "transformed", lambda x: False)
    return SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float32, shape=(1, 2, 3, 4), dim=lambda: 4
    )


@pytest.mark.parametrize("op", IN_TRITON)
def test_a_gpu_is_served_by_triton(monkeypatch, on_gpu, op):
    as_if(monkeypatch)
    assert dispatch.choose(op, "auto", on_gpu) == "triton"
    rows = {row.implementation: row.serves for row in dispatch.explain() if row.op == op}
    assert rows["triton"] == "GPU"


@pytest.mark.parametrize("op", IN_TRITON)
@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"triton": None}, "Triton is not installed"),
        ({"triton": "3.3.1"}, "it needs Triton 3.4 or later, found 3.3.1"),
        ({"capability": (7, 5)}, "it needs compute capability 8.0, the GPU has 7.5"),
        ({"hip": "6.1"}, "it runs on NVIDIA GPUs only"),
    ],
)
def test_an_unsupported_gpu_is_told_once(monkeypatch, on_gpu, machine, reason, op):
    as_if(monkeypatch, **machine)
    with pytest.warns(UserWarning, match=f"chunked PyTorch here, not Triton: {reason}"):
        assert dispatch.choose(op, "auto", on_gpu) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(op, "auto", on_gpu) == "torch"
    with pytest.raises(RuntimeError, match=f"impl='triton' cannot serve {op} here: {reason}"):
        dispatch.choose(op, "triton", on_gpu)
    rows = {row.implementation: row for row in dispatch.explain() if row.op == op}
    assert rows["triton"].reason.startswith(reason)
    assert (rows["triton"].serves, "GPU" in rows["torch"].serves) == ("", True)


@pytest.mark.parametrize("op", sorted(set(dispatch.IMPLEMENTATIONS) - set(IN_TRITON)))
def test_on_a_gpu_the_others_are_pytorch_without_a_word(monkeypatch, on_gpu, op):
    as_if(monkeypatch, triton=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(op, "auto", on_gpu) == "torch"
    rows = {row.implementation: row.serves for row in dispatch.explain() if row.op == op}
    assert "GPU" in rows["torch"]


def test_what_triton_cannot_do_is_chunked(monkeypatch, on_gpu):
    as_if(monkeypatch)
    for change, reason in (
        ({"dtype": torch.float64}, "it has float32 sums, the tensors are float64"),
        ({"shape": (1, 1, 2**16, 2**16)}, "a state of 65536 x 65536 numbers is too large"),
    ):
        x = SimpleNamespace(**vars(on_gpu) | change)
        assert dispatch.choose("linear_attention", "auto", x) == "torch"
        with pytest.raises(RuntimeError, match=reason):
            dispatch.choose("linear_attention", "triton", x)


def test_keys_that_are_too_wide_for_a_recurrence_are_chunked(monkeypatch, on_gpu):
    as_if(monkeypatch)
    x = SimpleNamespace(**vars(on_gpu) | {"shape": (1, 1, 1, 257)})
    assert dispatch.choose("recurrence", "auto", x) == "torch"
    assert dispatch.choose("linear_attention", "auto", x) == "triton"
    with pytest.raises(RuntimeError, match="keys of 257 features are wider than 256"):
        dispatch.choose("recurrence", "triton", x)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    x = torch.zeros(1, 2, 3, 4)
    assert dispatch.choose("linear_attention", "auto", x) != "triton"
    with pytest.raises(RuntimeError, match="it runs on an NVIDIA GPU, the tensors are on cpu"):
        dispatch.choose("linear_attention", "triton", x)
    monkeypatch.setattr(dispatch, "_TRITON", "3.7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = {row.implementation: row for row in dispatch.explain()}
    assert (rows["triton"].serves, rows["triton"].reason) == ("", "there is no GPU that PyTorch can use")


def test_interpreted_triton_is_never_chosen_by_itself(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", True)
    monkeypatch.setattr(dispatch, "_TRITON", "3.7.1")
    x = torch.zeros(1, 2, 3, 4)
    assert dispatch.choose("linear_attention", "auto", x) in ("native", "torch")
    assert dispatch.choose("linear_attention", "triton", x) == "triton"


def test_what_is_negated_lazily_has_its_sign():
    """PyTorch's dispatcher resolves the negation; kernels alone would not."""
    torch.manual_seed(0)
    negated = torch.complex(torch.zeros(1, 6, 2), torch.rand(1, 6, 2)).conj().imag
    assert negated.is_neg()
    q = torch.randn(1, 6, 2, 4)
    with torch.no_grad():
        y = ops.linear_attention(q, q, q, log_decay=negated)[0]
        expected = ops.linear_attention(q, q, q, log_decay=negated.resolve_neg())[0]
    assert torch.equal(y, expected)

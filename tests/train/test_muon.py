"""Muon compared with that of PyTorch, and what it does to a matrix."""

import pytest
import torch

from lintra.train.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (3, 8, 24)])
def test_the_singular_vectors_are_kept(shape):
    """x = U S V^T becomes U S' V^T with S' near 1: only a diagonal lies between U and V."""
    x = torch.randn(shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ orthogonal(x) @ v.mT
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, torch.diag_embed(diagonal))
    known = values > 0.02 * values.max()  # five steps take what is smaller only part of the way
    assert ((diagonal > 0.5) & (diagonal < 1.3))[known].all()


def test_a_gradient_of_zeros_moves_nothing():
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_matrices_of_a_shape_do_not_touch_each_other():
    x = torch.randn(5, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(orthogonal(x), torch.stack([orthogonal(each) for each in x]))


@pytest.mark.parametrize("bf16", [False, True])
def test_steps_are_those_of_pytorch(bf16):
    """Its iteration is in bfloat16: the remaining difference is that rounding."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip(f"PyTorch {torch.__version__} has no Muon to compare with")
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in _matrices()] for _ in range(2))
    optimizers = (
        Muon(ours, lr=0.01, weight_decay=0.1, bf16=bf16),
        torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    start = [x.detach().clone() for x in ours]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for first, mine, other in zip(start, ours, theirs, strict=True):
        assert (mine - other).norm() < 0.03 * (other - first).norm()


def test_a_closure_gives_gradients_and_loss():
    """As `torch.optim` says: it is called with gradients on, and its loss returned."""
    first, second = (torch.nn.Parameter(_matrices()[0]) for _ in range(2))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = (x**2).sum()
        loss.backward()
        return loss

    before = (first**2).sum().item()
    loss = Muon([first], lr=0.01, weight_decay=0.0).step(lambda: loss_of(first))
    loss_of(second)
    assert Muon([second], lr=0.01, weight_decay=0.0).step() is None
    assert loss.item() == before
    assert torch.equal(first, second)


def _matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((16, 8), (8, 16), (16, 8), (12, 12))]

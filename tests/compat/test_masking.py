"""Masks: their properties, and that each is computed once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lintra.compat.fast_transformers.masking import BaseMask, FullMask, LengthMask, TriangularCausalMask

PROPERTIES = (
    "bool_matrix",
    "float_matrix",
    "additive_matrix",
    "additive_matrix_finite",
    "lengths",
    "all_ones",
    "lower_triangular",
    "shape",
)
TRIANGLE = torch.ones(5, 5, dtype=torch.bool).tril()


class Own(BaseMask):
    """A user's mask that has only its matrix."""

    @property
    def bool_matrix(self):
        return torch.arange(5) <= torch.arange(3)[:, None]


MASKS = {
    "full": lambda: FullMask(TRIANGLE),
    "rows of zeros": lambda: FullMask(torch.zeros(2, 3, dtype=torch.bool)),
    "all true": lambda: FullMask(3, 5),
    "lengths": lambda: LengthMask(torch.tensor([3, 1]), max_len=4),
    "long": lambda: LengthMask(torch.tensor([4, 9]), max_len=4),
    "causal": lambda: TriangularCausalMask(4),
    "causal of one": lambda: TriangularCausalMask(1),
    "own": Own,
}


class Count(TorchDispatchMode):
    """Counts the operators that run."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("name", MASKS)
def test_the_rest_follows_from_the_matrix(name):
    mask = MASKS[name]()
    matrix = mask.bool_matrix
    assert matrix.dtype == torch.bool
    assert matrix.is_contiguous()
    assert mask.shape == matrix.shape
    assert torch.equal(mask.float_matrix, matrix.float())
    assert torch.equal(mask.additive_matrix.exp(), matrix.float())
    assert torch.equal(mask.additive_matrix_finite, torch.where(matrix, 0.0, -1e24))
    assert torch.equal(mask.lengths.clamp(max=mask.shape[-1]), matrix.sum(-1))
    assert mask.all_ones is bool(matrix.all())
    square = torch.ones(len(matrix), len(matrix), dtype=torch.bool).tril()
    wide = torch.nn.functional.pad(square, (0, matrix.shape[1] - len(matrix)))
    assert mask.lower_triangular is torch.equal(matrix, wide)


@pytest.mark.parametrize("name", sorted(MASKS.keys() - {"own"}))
def test_everything_is_computed_once(name):
    mask = MASKS[name]()
    first = [getattr(mask, one) for one in PROPERTIES]
    with Count() as ran:
        again = [getattr(mask, one) for one in PROPERTIES]
    assert ran.number == 0
    for one, other in zip(first, again, strict=True):
        assert one is other or one == other


@pytest.mark.parametrize(
    "make", [lambda: FullMask(1000), lambda: FullMask(7, 1000), lambda: TriangularCausalMask(1000)]
)
def test_a_matrix_is_made_only_if_it_is_asked_for(make):
    mask = make()
    with Count() as ran:
        _ = mask.all_ones, mask.shape
        _ = isinstance(mask, LengthMask) and mask.lower_triangular
    assert ran.number == 0


def test_a_mask_first_read_in_inference_mode_serves_training():
    with torch.inference_mode():
        masks = [FullMask(TRIANGLE), FullMask(5), LengthMask(torch.arange(1, 6)), TriangularCausalMask(5)]
        for mask in masks:
            _ = [getattr(mask, one) for one in PROPERTIES]
    for mask in masks:
        x = torch.ones(5, 5, requires_grad=True)
        (x * mask.float_matrix + x.masked_fill(mask.bool_matrix, 0)).sum().backward()
        assert torch.equal(x.grad, torch.ones(5, 5))


def test_a_mask_is_a_copy():
    matrix, lengths = TRIANGLE.clone(), torch.tensor([1, 2])
    full, some = FullMask(matrix), LengthMask(lengths, 3)
    matrix.zero_()
    lengths.zero_()
    assert torch.equal(full.bool_matrix, TRIANGLE)
    assert some.bool_matrix.tolist() == [[True, False, False], [True, True, False]]


def test_ways_to_give_a_size():
    assert FullMask(4).shape == FullMask(N=4).shape == (4, 4)
    assert FullMask(4, 2).shape == FullMask(N=4, M=2).shape == FullMask(4, M=2).shape == (4, 2)
    assert LengthMask(torch.tensor([2, 3])).shape == (2, 3)
    assert LengthMask(torch.tensor([2, 3]), 5, "cpu").shape == (2, 5)
    assert LengthMask(torch.tensor([2, 3]), device="cpu").lengths.tolist() == [2, 3]
    assert isinstance(TriangularCausalMask(3), LengthMask)


def test_what_is_refused():
    with pytest.raises(ValueError, match="must be boolean"):
        FullMask(torch.ones(2, 2))
    with pytest.raises(ValueError, match="needs a mask or its size"):
        FullMask()
    holes = FullMask(torch.tensor([[True, False], [False, True]]))
    for _ in range(2):
        with pytest.raises(ValueError, match="no lengths"):
            _ = holes.lengths
    assert not holes.lower_triangular


@pytest.mark.parametrize("make", [lambda: FullMask(3, 5), lambda: TriangularCausalMask(5)])
def test_masks_compile_into_one_graph(make):
    """For masks made inside the compiled function and outside it."""
    outside = make()

    def read(x):
        for mask in (outside, make()):
            x = x + mask.float_matrix.sum() + mask.bool_matrix.sum()
            x = x + (1 if mask.all_ones else 2)
        return x

    zero = torch.zeros(())
    assert torch.compile(read, backend="eager", fullgraph=True)(zero) == read(zero)

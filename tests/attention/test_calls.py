"""How any mechanism is built and called: with sizes that are integers, what it reads and nothing else."""

import pytest
import torch

from lintra import attention
from tests.attention.test_laws import cases
from tests.laws import Case

MODES = [pytest.param(case, id=str(case)) for case in cases() if not case.rotary]


@pytest.mark.parametrize("case", MODES)
def test_an_unknown_keyword_is_refused(case: Case):
    q, k, v, *reads = case.draw()
    mechanism = case.build()
    given = dict(zip(mechanism.reads(), reads, strict=True))
    with pytest.raises(TypeError, match="glboal_mask"):
        mechanism(q, k, v, glboal_mask=torch.ones(q.shape[:2], dtype=torch.bool), **given)


@pytest.mark.parametrize("name", attention.names())
@pytest.mark.parametrize("size", ["heads", "kv_heads", "dim", "value_dim"])
def test_sizes_are_whole_numbers(name, size):
    causal = attention.mechanism(name).can.causal
    with pytest.raises(TypeError, match=rf"^{size} must be int, got 2\.0$"):
        attention.load(name).Config().build(**{"heads": 4, "dim": 4, "causal": causal, size: 2.0})

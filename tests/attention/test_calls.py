"""How any mechanism is called: with what it reads and nothing else, and on devices that hold no numbers."""

import pytest
import torch

from lintra import attention
from tests.attention.test_laws import cases
from tests.laws import Case, forward

MODES = [pytest.param(case, id=str(case)) for case in cases() if not case.rotary]


@pytest.mark.parametrize("case", MODES)
def test_an_unknown_keyword_is_refused(case: Case):
    q, k, v, *reads = case.draw()
    mechanism = case.build()
    given = dict(zip(mechanism.reads(), reads, strict=True))
    with pytest.raises(TypeError, match="glboal_mask"):
        mechanism(q, k, v, glboal_mask=torch.ones(q.shape[:2], dtype=torch.bool), **given)


@pytest.mark.parametrize("case", [mode for mode in MODES if "impl='native'" not in mode.id])
def test_shapes_are_known_without_numbers(case: Case):
    q, k, v, *reads = (x.to("meta") for x in case.draw())
    k = q if attention.mechanism(case.name).shared_key else k
    y = forward(case, case.build().to("meta"), q, k, v, *reads)
    assert (y.device.type, y.shape) == ("meta", (*q.shape[:3], v.shape[3]))


@pytest.mark.parametrize("name", attention.names())
@pytest.mark.parametrize("size", ["heads", "kv_heads", "dim", "value_dim"])
def test_sizes_are_whole_numbers(name, size):
    causal = attention.mechanism(name).can.causal
    with pytest.raises(TypeError, match=rf"^{size} must be int, got 2\.0$"):
        attention.load(name).Config().build(**{"heads": 4, "dim": 4, "causal": causal, size: 2.0})

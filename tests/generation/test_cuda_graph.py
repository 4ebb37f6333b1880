"""Recorded steps give the same tokens as unrecorded ones. A recording here runs the function again."""

import warnings

import pytest
import torch

from lintra import attention
from lintra.attention import linear, softmax
from lintra.generation import cuda_graph
from lintra.generation.sampling import generate, generate_reference
from lintra.models import decoder
from tests.generation.test_sampling import build_seq2seq

SHAPE = {"vocabulary": 11, "layers": 2, "heads": 2, "width": 16}
PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6]])


def build(mechanism, **changes):
    torch.manual_seed(0)
    return decoder.Config(attention=mechanism, **SHAPE, **changes).build().double()


def constant():
    """The mechanisms with states of constant size in their default configuration."""
    for name in attention.names():
        config = attention.for_length(attention.load(name).Config, 64)
        can = attention.mechanism(name).can
        if can.causal and config.build(heads=2, dim=8, causal=True).can.state == "constant":
            yield name, config


CONSTANT = dict(constant())


@pytest.fixture
def recordings(monkeypatch):
    """The runs of each recorded function, as if there were a device to replay it."""
    runs = []

    def record(function, device):
        function()  # a device runs it once to warm up: side effects must not matter
        return lambda: runs.append(function) or function()

    monkeypatch.setattr(cuda_graph, "record", record)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    return runs


@pytest.mark.parametrize("name", CONSTANT)
def test_recorded_tokens_are_those_of_the_definition(name, recordings):
    model, lengths = build(CONSTANT[name]), torch.tensor([3, 1])
    found = generate(model, PROMPT, lengths=lengths, steps=40, seed=1)
    assert len(recordings) == 39
    assert torch.equal(found, generate_reference(model, PROMPT, lengths=lengths, steps=40, seed=1))


def test_a_state_in_bfloat16_stays_so(recordings, monkeypatch):
    model, options = build(linear.Config()), {"steps": 40, "seed": 1, "state_dtype": torch.bfloat16}
    found = generate(model, PROMPT, **options)
    assert len(recordings) == 39
    monkeypatch.setattr(cuda_graph, "can_replay", lambda model: False)
    assert torch.equal(found, generate(model, PROMPT, **options))


def test_a_memory_goes_along(recordings):
    model, source = build_seq2seq(cross=linear.Config()), torch.randint(0, 7, (2, 5))
    found = generate(model, PROMPT, source=source, steps=40, seed=1)
    assert len(recordings) == 39
    assert torch.equal(found, generate_reference(model, PROMPT, source=source, steps=40, seed=1))


def test_what_is_not_recorded(recordings):
    """Growing states and short generations; and a state that the caller still holds is not changed."""
    generate(build(softmax.Config()), PROMPT, steps=40)
    generate(build(linear.Config()), PROMPT, steps=cuda_graph.MIN_STEPS)
    assert recordings == []
    model = build(linear.Config()).eval()
    _, state = model.extend(PROMPT)
    before = attention.map_state(torch.clone, state)
    step = cuda_graph.choose_extend(model, PROMPT[:, :1], state, 40)
    step(PROMPT[:, :1], state)
    assert len(recordings) == 1
    attention.map_state(lambda a, b: torch.testing.assert_close(a, b), state, before)
    with pytest.raises(ValueError, match="takes no mask"):
        step(PROMPT[:, :1], state, mask=PROMPT[:, :1] > 0)


def test_a_device_that_cannot_record_goes_on_without(recordings, monkeypatch):
    def refuse(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "record", refuse)
    model = build(linear.Config())
    with pytest.warns(UserWarning, match="without a CUDA graph, which is slower: operation not permitted"):
        found = generate(model, PROMPT, steps=40, seed=1)
    monkeypatch.undo()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(found, generate(model, PROMPT, steps=40, seed=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_graph_gives_the_tokens_of_the_steps(monkeypatch, dtype):
    model, options = build(linear.Config()).float().cuda(), {"steps": 40, "seed": 1, "state_dtype": dtype}
    found = generate(model, PROMPT.cuda(), **options)
    monkeypatch.setattr(cuda_graph, "can_replay", lambda model: False)
    assert torch.equal(found, generate(model, PROMPT.cuda(), **options))

"""Decoding as one CUDA graph: the kernels of a token are recorded once and from then on launched together.

A GPU takes a token of a small model in less time than Python needs to launch its kernels one by one. A state
of constant size makes the kernels of every token the same, at the same places.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lintra.attention import Attention, State, map_state
from lintra.models import Decoder

WORTH = 32  # tokens: for fewer, recording takes longer than it saves

Extend = Callable[..., tuple[Tensor, Any]]


def extend_of(model: Decoder, tokens: Tensor, state: State, steps: int) -> Extend:
    """How `steps` tokens are to follow `state`, one by one: `model.extend`, or a recording of it.

    tokens [b 1] and the state are what it will be called with, but for their values. The recording gives
    tensors that its next call overwrites.
    """
    if steps < WORTH or not can_replay(model):
        return model.extend
    try:
        return Replay(model, tokens, state)
    except RuntimeError as error:
        warnings.warn(f"decoding without a CUDA graph, which is slower: {error}", stacklevel=2)
        return model.extend


def can_replay(model: Decoder) -> bool:
    """Whether the model is on a CUDA device and no state in it grows."""
    causal = [x for x in model.modules() if isinstance(x, Attention) and x.causal]
    return model.head.weight.is_cuda and all(x.can.state == "constant" for x in causal)


class Replay:
    """`model.extend` of one token for every sequence, recorded. Values in between are the graph's own."""

    def __init__(self, model: Decoder, tokens: Tensor, state: State):
        self.tokens, self.state = tokens.clone(), map_state(torch.clone, state)
        self.params: Tensor
        self.launch = record(lambda: self._step(model))

    def __call__(self, tokens: Tensor, state: State, mask: None = None) -> tuple[Tensor, State]:
        """As `model.extend`; without a mask, which would be another graph."""
        if mask is not None:
            raise ValueError("a recorded step takes no mask")
        self.tokens.copy_(tokens)
        if state is not self.state:
            map_state(Tensor.copy_, self.state, state)
        self.launch()
        return self.params, self.state

    def _step(self, model: Decoder) -> None:
        self.params, after = model.extend(self.tokens, self.state)
        map_state(Tensor.copy_, self.state, after)


def record(function: Callable[[], object]) -> Callable[[], None]:
    """The kernels of a function as one CUDA graph -> what launches them. Runs it before, so that kernels are
    compiled and chosen; a stream of its own, as torch.cuda.graph asks."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, tunes, allocates
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay

"""Decoding as one CUDA graph: the kernels of a token are recorded once and from then on launched together.

A GPU takes a token of a small model in less time than Python needs to launch its kernels one by one. A state
of constant size makes the kernels of every token the same, at the same places.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lintra.attention import Attention, State, map_state
from lintra.models import Decoder
from lintra.nn.parameters import has_hooks, reference_param

MIN_STEPS = 32  # tokens: a recording itself runs the step several times
_recording = threading.Lock()  # one at a time in a process

Extend = Callable[..., tuple[Tensor, Any]]


def choose_extend(model: Decoder, tokens: Tensor, state: State, steps: int) -> Extend:
    """Return the function that makes `steps` tokens follow `state`, one by one: `model.extend`, or a
    recording of it.

    tokens [b 1] and the state are those of its calls, except for their values. The recording returns tensors
    that its next call overwrites.
    """
    if steps < MIN_STEPS or not can_replay(model):
        return model.extend
    try:
        return GraphedDecoder(model, tokens, state)
    except RuntimeError as error:
        # The end of a recording that failed says only that it failed.
        cause = error.__context__ or error
        warnings.warn(f"decoding without a CUDA graph, which is slower: {cause}", stacklevel=3)
        return model.extend


def can_replay(model: Decoder) -> bool:
    """Return whether the model is on a CUDA device, no state in it grows, and no hook runs at each token."""
    on_gpu = reference_param(model).is_cuda
    return on_gpu and has_constant_state(model) and not any(map(has_hooks, model.modules()))


def has_constant_state(model: Decoder) -> bool:
    """Return whether a state of the model is as large after any number of tokens as before the first."""
    causal = [x for x in model.modules() if isinstance(x, Attention) and x.causal]
    return all(x.can.state == "constant" for x in causal)


class GraphedDecoder:
    """`model.extend` of one token for every sequence, recorded."""

    def __init__(self, model: Decoder, tokens: Tensor, state: State):
        own_tokens, own_state = tokens.clone(), map_state(torch.clone, state)
        made: dict[str, Tensor] = {}

        def step() -> None:
            made["params"], after = model.extend(own_tokens, own_state)
            map_state(Tensor.copy_, own_state, after)

        self.tokens, self.state, self.made = own_tokens, own_state, made
        self.launch = record(step, tokens.device)

    def __call__(self, tokens: Tensor, state: State, mask: None = None) -> tuple[Tensor, State]:
        """Extend as `model.extend`, without a mask, which would need another graph."""
        if mask is not None:
            raise ValueError("a recorded step takes no mask")
        self.tokens.copy_(tokens)
        if state is not self.state:
            map_state(Tensor.copy_, self.state, state)
        self.launch()
        return self.made["params"], self.state


def record(function: Callable[[], object], device: torch.device | str = "cuda") -> Callable[[], None]:
    """Capture a function as a CUDA graph. Return a function that replays it on the current stream.

    Runs it first, so that kernels are compiled and tuned. Other threads may use the device meanwhile."""
    with _recording, torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # restores the previous stream, whatever happens
            for _ in range(3):  # compiles, tunes, allocates
                function()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                function()
        torch.cuda.current_stream().wait_stream(side)

    def launch(read: Callable[[], object] = function) -> None:
        graph.replay()  # which reads what the function reads: `launch` keeps it alive

    return launch

"""Generation as an RNN: the prompt in parallel, then one token at a time with the same weights.

`generate_reference` recomputes the whole sequence for every token. Both draw the same numbers, so they give
the same tokens for the same seed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lintra.config.fields import spelled
from lintra.generation import cuda_graph, native_decode
from lintra.generation.inputs import GenerationInputs, prepare_inputs
from lintra.generation.options import GenerationOptions
from lintra.generation.options import Sampler as _Sampler
from lintra.legacy import renamed_attribute
from lintra.models import Decoder, Forecaster
from lintra.models.decoder import DecoderState
from lintra.nn.block import Block, CrossState
from lintra.ops.padding import last_real, take

__all__ = [
    "cast_state",
    "check_recurrent",
    "evaluation",
    "generate",
    "generate_reference",
    "last",
    "stream",
]


def generate(
    model: Decoder,
    prompt: Int[Tensor, "b t"] | None = None,
    options: GenerationOptions | None = None,
    *,
    lengths: Int[Tensor, "b"] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    **keywords: Any,
) -> Int[Tensor, "b n"]:
    """Return the tokens that follow the prompt, [b n]; arguments and errors as in `stream`.

    n is `steps`, or less where all sequences ended earlier; after its end a sequence is filled up with `end`,
    or with -1 where that is None."""
    tensors = {"lengths": lengths, "source": source, "source_mask": source_mask}
    inputs = prepare_inputs(model, prompt, options, **tensors, **keywords)
    check_recurrent(model)
    return _collect(_recurrent(model, inputs), inputs)


def generate_reference(
    model: Decoder,
    prompt: Int[Tensor, "b t"] | None = None,
    options: GenerationOptions | None = None,
    *,
    lengths: Int[Tensor, "b"] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    **keywords: Any,
) -> Int[Tensor, "b n"]:
    """Generate by the definition, without a state: the whole sequence is computed again for every token, with
    the model's own weights. Raises ValueError for a state_dtype too."""
    tensors = {"lengths": lengths, "source": source, "source_mask": source_mask}
    inputs = prepare_inputs(model, prompt, options, **tensors, **keywords)
    if (dtype := inputs.options.state_dtype) is not None:
        raise ValueError(f"state_dtype must be None: there is no state to keep, got {dtype}")
    return _collect(_recomputed(model, inputs), inputs)


def stream(
    model: Decoder,
    prompt: Int[Tensor, "b t"] | None = None,
    options: GenerationOptions | None = None,
    *,
    lengths: Int[Tensor, "b"] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    **keywords: Any,
) -> Iterator[Int[Tensor, "b"]]:
    """Yield the next token of every sequence, [b], `steps` times or until all sequences have ended; memory
    grows only if the state does.

    prompt: without the start symbol; lengths [b]: how many tokens of each prompt are real, counted from its
    left. A Seq2Seq model needs a source for each sequence, symbols [b s] or features [b s i]; source_mask
    [b s], True for what is real. Instead of options, their fields can be given as keywords.

    The model stays in evaluation mode until the stream ends. Raises ValueError for a mechanism without a
    recurrent form (use `generate_reference`); for an empty prompt where the model has no start
    symbol, a prompt of anything but symbols, lengths, a batch or a source that do not fit, and what
    `GenerationOptions` refuses; for more tokens than the model has positions; for a state_dtype other than
    bfloat16 or None, or with a mechanism that cannot keep its state so; for weights of less than float32
    where no step can be fused; TypeError for what is not a number, and for options given beside keywords.
    """
    tensors = {"lengths": lengths, "source": source, "source_mask": source_mask}
    inputs = prepare_inputs(model, prompt, options, **tensors, **keywords)
    check_recurrent(model)
    return _recurrent(model, inputs)


@torch.no_grad()
def _recurrent(model: Decoder, inputs: GenerationInputs) -> Iterator[Tensor]:
    with evaluation(model):
        memory, tokens, mask = inputs.memory(model), inputs.tokens, inputs.mask
        state = model.start(*memory) if memory else None
        extend = model.extend
        sampler, ending = inputs.options.sampler, inputs.ending()
        for uniform in inputs.uniforms:
            params, state = extend(tokens, state, mask=mask)
            token = ending.mark(sampler.draw(model.output, last(params, mask), uniform))
            following = token.clamp(min=0)  # of a filler, whose prediction is not used
            yield token
            if ending.all():
                return
            if tokens is inputs.tokens and inputs.options.steps > 1:  # all steps after the prompt are alike
                state = cast_state(model, state, inputs.options.state_dtype)
                extend = _decode_function(model, following[:, None], state, inputs)
            tokens, mask = following[:, None], None


def _decode_function(
    model: Decoder, tokens: Tensor, state: Any, inputs: GenerationInputs
) -> cuda_graph.Extend:
    """Return how the tokens after the prompt are made: fused on a CPU, recorded on a GPU, or by
    `model.extend`."""
    steps = inputs.options.steps - 1
    fusible = (
        steps >= native_decode.MIN_STEPS
        and inputs.options.state_dtype is None
        and native_decode.why_not(model) is None
    )
    if inputs.options.weights != "float32" or fusible:
        return native_decode.NativeDecoder(model, state, inputs.options.weights)
    return cuda_graph.choose_extend(model, tokens, state, steps)


@torch.no_grad()
def _recomputed(model: Decoder, inputs: GenerationInputs) -> Iterator[Tensor]:
    with evaluation(model):
        memory, tokens, mask = inputs.memory(model), inputs.tokens, inputs.mask
        sampler, ending = inputs.options.sampler, inputs.ending()
        for uniform in inputs.uniforms:
            params = model(tokens, *memory, mask=mask)
            token = ending.mark(sampler.draw(model.output, last(params, mask), uniform))
            following = token.clamp(min=0)
            yield token
            if ending.all():
                return
            tokens = torch.cat((tokens, following[:, None]), 1)
            mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), 1)


def _collect(tokens: Iterator[Tensor], inputs: GenerationInputs) -> Tensor:
    sampled = list(tokens)
    if sampled:
        return torch.stack(sampled, 1)
    return torch.empty(len(inputs.tokens), 0, dtype=torch.int64, device=inputs.tokens.device)


def check_recurrent(model: Decoder | Forecaster) -> None:
    """Raise ValueError for a network that has no state to resume from."""
    for block in model.blocks:
        attention = block.attn.attention
        if not attention.can.recurrent:
            reference = "generate_reference recomputes the whole sequence for every token"
            decodes = isinstance(model, Decoder)
            instead = f"lintra.generation.sampling.{reference}" if decodes else "take another mechanism"
            raise ValueError(
                f"attention {attention.name!r} has no recurrent form with "
                f"{spelled(attention.config)}: {instead}"
            )


def cast_state(model: Decoder, state: DecoderState, dtype: torch.dtype | None) -> DecoderState:
    """Return the state with its sums of keys times values in `dtype` from here on: bfloat16; None: no change.

    Half the memory; on a GPU the linear sum's step also moves half as much. A token is computed in float32
    and kv is rounded to the nearest once a token, so that what a token adds is lost beside a sum some 500
    times as large. Bad for sums that never decay (linear, cosformer, performer): after a few hundred tokens
    they fall behind, in the end they stop growing. For mechanisms that forget within some tens of tokens
    (gated, delta, fast retention): docs/performance/generation.md has the errors, benchmarks/drift.py
    measures them.
    Denominators, exponents and what cross-attention reads stay as they are. Raises ValueError for another
    dtype and a mechanism that cannot keep its state so.
    """
    if dtype is None:
        return state

    def kept(block: Block, layer: Any) -> Any:
        if isinstance(layer, CrossState):
            return layer._replace(own=kept(block, layer.own))
        return layer._replace(attention=block.attn.attention.cast_state(layer.attention, dtype))

    return state._replace(layers=tuple(map(kept, model.blocks, state.layers)))


def last(params: Tensor, mask: Tensor | None) -> Tensor:
    """The parameters after the last real token of each sequence, [b t p] -> [b p]."""
    if mask is None:
        return params[:, -1]
    return take(params, last_real(mask)[:, None])[:, 0]


class _Users:
    """Users of one model's evaluation mode, and which of its modules are to train once they are done."""

    def __init__(self) -> None:
        self.count = 0
        self.training: list[nn.Module] = []
        # Taken again inside where the garbage collector ends a stream that was dropped.
        self.lock = threading.RLock()


_USERS: WeakKeyDictionary[nn.Module, _Users] = WeakKeyDictionary()


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode inside; afterwards, once all its users are done, restore its modes.

    Threads that use different models do not wait for each other.
    """
    users = _USERS.setdefault(model, _Users())
    with users.lock:
        users.count += 1
        users.training += [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with users.lock:
            users.count -= 1
            if not users.count:
                for module in users.training:
                    module.training = True
                users.training = []


__getattr__ = renamed_attribute(__name__, {"Sampler": _Sampler})

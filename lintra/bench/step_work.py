"""Operations, bytes and memory of a training step of a decoder, counted from its configuration.

The network is built without numbers, on PyTorch's meta device; its parameters, states and products of
matrices are read from what was built. A multiplication and an addition are two operations. Norms,
activations, softmax's exponentials and the optimizer's arithmetic are not counted: on any machine they wait
for memory."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn

from lintra.attention import State, delta, leaves, linear, softmax
from lintra.models import decoder
from lintra.nn.block import Block
from lintra.nn.context_cost import delta_operations

Mechanism = Literal["linear", "delta", "softmax"]
_KINDS: dict[type, Mechanism] = {linear.Config: "linear", delta.Config: "delta", softmax.Config: "softmax"}
BACKWARD = 2  # products in the backward for each of the forward: of the gradients of both factors
MOMENTS = 2  # numbers that AdamW keeps beside each parameter and its gradient
LOSS_TOKENS = 8192  # whose scores over the vocabulary are in memory at once: the loss is taken in such pieces


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a number, by what it is."""

    master: int = 4  # parameters, gradients and moments, as the optimizer has them
    gathered: int = 4  # parameters in the form that FSDP2 gathers
    reduced: int = 4  # gradients in the form in which they are added up
    activation: int = 4
    state: int = 4  # of a recurrence


MIXED = Bytes(gathered=2, activation=2)  # bfloat16, but for sums


@dataclass(frozen=True)
class Passes:
    """An amount, such as of operations or bytes, in a forward and in its backward."""

    forward: float
    backward: float

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)


def products(operations: float) -> Passes:
    """Return the operations of products of matrices whose factors both need gradients."""
    return Passes(operations, BACKWARD * operations)


class Work:
    """The work of a decoder whose layers have one mechanism: linear, delta, or softmax without a window.

    Raises ValueError for another mechanism, or several."""

    def __init__(self, config: decoder.Config):
        if len(config.mechanisms) != 1 or type(config.mechanisms[0]) not in _KINDS:
            names = ", ".join(_KINDS.values())
            raise ValueError(f"attention must be one of {names} in all layers, got {config.attention}")
        self.mechanism: Mechanism = _KINDS[type(config.mechanisms[0])]
        if getattr(config.mechanisms[0], "window", None) is not None:
            raise ValueError(f"attention must have no window, got {config.attention}")
        self.config, self.layers = config, config.layers
        self.model = _on_meta(config)
        self.attention = self.block.attn.attention

    @property
    def block(self) -> Block:
        """One of the blocks, which are all alike."""
        return self.model.blocks[0]

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of a block."""
        return _numbers(self.block)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the network."""
        return _numbers(self.model)

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the blocks: the embedding, the last norm and the head."""
        return self.parameters - self.layers * self.block_parameters

    @cached_property
    def tensors(self) -> int:
        """Parameters of the network, counted as tensors."""
        return sum(1 for _ in self.model.parameters())

    # Operations.

    def head_operations(self, tokens: int) -> Passes:
        """Return the operations of the product by the head's weight: 2 c p a token."""
        return products(2 * tokens * self.config.width * self.model.output.size)

    def block_operations(self, tokens: int, length: int) -> Passes:
        """Return the operations of a block on so many tokens, in sequences of `length`.

        Each weight of a linear map is multiplied once a token: 2 operations, 4 in the backward."""
        weights = sum(x.weight.numel() for x in self.block.modules() if isinstance(x, nn.Linear))
        return products(2 * tokens * weights) + self.attention_operations(tokens, length)

    def attention_operations(self, tokens: int, length: int) -> Passes:
        """Return the operations of a block's mechanism, in the form by chunks of c tokens.

        A token and query head, of r to a state, features f and values of width e:

            linear    c (f + e) within the chunk, f e + f to read the state, f e / r to add to it; twice each
            delta     and c f / r of keys by keys, c (f + e) / 2 r for the triangle, f (f + 2 e) / r for
                      what a chunk erases and reads, f f e / c r to carry the state over it; twice each
            softmax   (t + 1) / 2 keys, d + e each, twice; the backward computes the scores again

        A chunk's triangle is solved twice more in the backward, its gradient is one more product."""
        a = self.attention
        if self.mechanism == "softmax":
            pairs = tokens * a.out_heads * (length + 1) / 2
            return Passes(4 * a.dim * pairs, 10 * a.dim * pairs)
        return self._recurrence_operations(tokens, length, a.out_heads, a.value_dim)

    def state_operations(self, tokens: int, length: int) -> Passes:
        """Return the operations of the pass that finds what a shard does to a state, and of its backward.

        The sum: 2 f e a token and state. The delta rule runs once more, from states that are wider by f: the
        transition is found beside them."""
        f, e = self.features, self.attention.value_dim
        if self.mechanism == "linear":
            return products(2.0 * tokens * self.states * f * e)
        return self._recurrence_operations(tokens, length, self.states, e + f)

    def _recurrence_operations(self, tokens: int, length: int, heads: int, e: int) -> Passes:
        """Return the operations of a recurrence by chunks, with so many query heads and values of width e."""
        n, f, states, chunk = tokens * heads, self.features, tokens * self.states, self._chunk(length)
        if self.mechanism == "linear":
            return products(2 * n * (chunk * (f + e) + f * e + f) + 2 * states * f * e)
        multiplied, solved = (2 * states * x for x in delta_operations(f, e, chunk, n / states))
        return products(multiplied) + Passes(solved, 3 * solved)

    def _chunk(self, length: int) -> int:
        return min(getattr(self.attention.config, "chunk", length), length)

    # States.

    @cached_property
    def features(self) -> int:
        """f, of a key: rows of a state."""
        return getattr(self.attention, "features", self.attention.dim)

    @property
    def states(self) -> int:
        """Heads with a state of their own."""
        return max(self.attention.kv_heads, self.attention.value_heads)

    @cached_property
    def state(self) -> tuple[Tensor, ...]:
        """The state of a layer and one sequence, without numbers."""
        return tuple(leaves(cast("State", self.block.start(1))))

    def state_bytes(self, sequences: int) -> Passes:
        """Return the bytes of a layer's state of so many sequences, and of the gradient of it.

        Those of a recurrence do not depend on the length; integers have no gradient."""
        floats = [x for x in self.state if x.is_floating_point()]
        return Passes(
            sequences * sum(x.nbytes for x in self.state), sequences * sum(x.nbytes for x in floats)
        )

    def transition_bytes(self, sequences: int, bytes: Bytes) -> int:
        """Return the bytes of what a shard does to the state before it: of the sum nothing, of the delta rule
        the f x f matrix of each state."""
        if self.mechanism != "delta":
            return 0
        return sequences * self.states * self.features**2 * bytes.state

    def combine_operations(self, sequences: int) -> float:
        """Return the operations of joining two shards, their states and transitions: 2 f f (f + e) a
        state."""
        if self.mechanism != "delta":
            return 0.0
        f = self.features
        return 2.0 * sequences * self.states * f * f * (f + self.attention.value_dim)

    def keys_bytes(self, tokens: int, bytes: Bytes) -> int:
        """Return the bytes of a layer's keys and values, which softmax hands round a ring."""
        a = self.attention
        return tokens * (a.kv_heads * a.dim + a.value_heads * a.value_dim) * bytes.activation

    # Memory.

    def optimizer_bytes(self, ranks: int, bytes: Bytes) -> float:
        """Return the bytes of parameters, gradients and AdamW's moments of a rank, sharded over `ranks`."""
        return self.parameters * bytes.master * (2 + MOMENTS) / ranks

    def update_bytes(self, ranks: int, bytes: Bytes) -> float:
        """Return the bytes that AdamW's update moves on a rank: parameters and moments read and written,
        gradients read."""
        return (2 * (1 + MOMENTS) + 1) * self.parameters * bytes.master / ranks

    def gathered_bytes(self, bytes: Bytes) -> float:
        """Return the bytes that FSDP2 has of whole parameters: what is outside of blocks, and two blocks, one
        of them on its way; and the whole gradients of one block."""
        whole = self.root_parameters + 2 * self.block_parameters
        return whole * bytes.gathered + self.block_parameters * bytes.reduced

    def activation_bytes(self, tokens: int, bytes: Bytes) -> float:
        """Return the bytes kept for the backward where blocks are recomputed: what enters each block, what
        one of them keeps, and the scores of LOSS_TOKENS and their gradients, in float32."""
        kept = self.layers * self.config.width * tokens * bytes.activation
        scores = 2 * 4 * min(tokens, LOSS_TOKENS) * self.model.output.size
        return kept + self.block_activation_bytes(tokens, bytes) + scores

    def block_activation_bytes(self, tokens: int, bytes: Bytes) -> float:
        """Return about the bytes that a block keeps for its backward, to within a third.

        A token: what enters the two norms and what leaves them, 4 c; q, k and v; what the mechanism gives;
        and what its feed-forward has before and behind the activation, swiglu's product beside."""
        config, attn = self.config, self.block.attn
        width = 4 * config.width + sum(attn.widths) + self.attention.out_heads * attn.dim
        width += sum(project.out_features for project in _linears(attn.extra_proj))
        if self.block.mlp is not None:
            width += self.block.mlp.up.out_features + self.block.mlp.down.in_features
        if config.activation == "swiglu" and self.block.mlp is not None:
            width += self.block.mlp.down.in_features
        if self.mechanism == "delta":  # before the convolution, behind it, of unit length
            width += 2 * sum(attn.widths)
        chunks = math.ceil(tokens / 64)
        kept = chunks * self.states * self.features * self.attention.value_dim * bytes.state
        return tokens * width * bytes.activation + (0 if self.mechanism == "softmax" else kept)


def _on_meta(config: decoder.Config) -> decoder.Decoder:
    with torch.device("meta"):
        return config.build()


def _linears(modules: nn.Module) -> list[nn.Linear]:
    return [x for x in modules.modules() if isinstance(x, nn.Linear)]


def _numbers(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())

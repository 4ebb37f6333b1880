"""Generation as an RNN: the prompt in parallel, then one token at a time with the same weights.

`generate_reference` recomputes the whole sequence for every token. Both draw the same numbers, so they give
the same tokens for the same seed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import Required, Unpack

from lintra.config import fields
from lintra.generation import cuda_graph, native_decode
from lintra.models import Decoder, Seq2Seq
from lintra.models.decoder import DecoderState
from lintra.native.quantize import Weights
from lintra.nn.block import Block, CrossState
from lintra.nn.distributions import Distribution, quantile
from lintra.nn.mask import lengths_to_mask
from lintra.nn.parameters import reference_param
from lintra.ops import checks

_ZERO = 2.0**-150  # what is not above it is 0 in float32


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a symbol is drawn from a distribution.

    temperature divides the log-probabilities, 0 takes the most probable symbol; top_k keeps the k most
    probable symbols, and those as probable as the last of them; top_p the fewest that hold at least that
    share of the probability (Holtzman et al. 2020, arXiv:1904.09751, section 3.1). Both filters apply after
    the temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        fields.check(self)
        fields.not_negative(self, "temperature")
        fields.at_least(self, top_k=1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    def probabilities(self, log_probs: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """What is drawn from."""
        if self.temperature <= _ZERO:
            return torch.zeros_like(log_probs).scatter(1, log_probs.argmax(1, keepdim=True), 1.0)
        # Relative to the largest: a tiny temperature must not make all of them -inf.
        log_probs = (log_probs - log_probs.amax(1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < log_probs.shape[1]:
            least = log_probs.topk(self.top_k, 1).values[:, -1:]
            log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
        probs = log_probs.softmax(1)
        if self.top_p is None:
            return probs
        # Stable: of equal ones the first stay, on every processor.
        ordered, order = probs.sort(dim=1, descending=True, stable=True)
        enough = ordered.cumsum(1) - ordered >= self.top_p
        probs = probs.masked_fill(enough.gather(1, order.argsort(1)), 0.0)
        return probs / probs.sum(1, keepdim=True)

    def draw(
        self, output: Distribution, params: Float[Tensor, "b p"], uniform: Float[Tensor, "b"]
    ) -> Int[Tensor, "b"]:
        """The symbol at which the cumulative probability passes `uniform`, numbers in [0, 1)."""
        if self.temperature == 1 and self.top_k is self.top_p is None:
            return output.quantile(params, uniform)
        return quantile(self.probabilities(output.log_probs(params)), uniform)


class Options(TypedDict, total=False):
    """What generation may be asked for.

    prompt comes first, without the start symbol; without a prompt, batch says how many sequences (default 1).
    lengths [b]: how many tokens of each prompt are real, counted from its left. seed fixes the draws; None
    draws differently each time; the global random generator is not used. A Seq2Seq model needs a source, one
    for each sequence. weights other than float32 are rounded copies, which a fused step on a CPU
    (`lintra.generation.native_decode`) reads in less time; the prompt goes through the model as it is.
    """

    steps: Required[int]  # tokens to generate
    temperature: float  # see Sampler, like the next two
    top_k: int | None
    top_p: float | None
    seed: int | None
    batch: int | None
    lengths: Tensor | None
    source: Tensor | None  # what a Seq2Seq model reads, symbols [b s] or features [b s i]
    source_mask: Tensor | None  # [b s], True for what is real
    state_dtype: torch.dtype | None  # bfloat16, for mechanisms that forget: see `keep`
    weights: Weights  # "float32", "bfloat16" or "int8"


def generate(
    model: Decoder, prompt: Int[Tensor, "b t"] | None = None, **options: Unpack[Options]
) -> Int[Tensor, "b n"]:
    """The `steps` tokens that follow the prompt, [b steps]."""
    return _collect(stream(model, prompt, **options), model, prompt, options)


def generate_reference(
    model: Decoder, prompt: Int[Tensor, "b t"] | None = None, **options: Unpack[Options]
) -> Int[Tensor, "b n"]:
    """`generate` by the definition, without a state: for every token the whole sequence once more, with the
    model's own weights. Raises ValueError for a state_dtype too."""
    begun = prepare_inputs(model, prompt, **options)
    if begun.state_dtype is not None:
        raise ValueError(f"state_dtype must be None: there is no state to keep, got {begun.state_dtype}")
    return _collect(_recomputed(model, begun), model, prompt, options)


def stream(
    model: Decoder, prompt: Int[Tensor, "b t"] | None = None, **options: Unpack[Options]
) -> Iterator[Int[Tensor, "b"]]:
    """Yields the next token of every sequence, [b], `steps` times; memory grows only if the state does.

    The model stays in evaluation mode until the stream ends. Raises ValueError for a mechanism without a
    recurrent form, for which `generate_reference` serves; for steps < 0, an empty prompt where the model has
    no start symbol, a prompt of what is no symbol, lengths, a batch, a seed or a source that do not fit, and
    what `Sampler` refuses; for more tokens than the model has positions; for a state_dtype other than
    bfloat16 or None, or with a mechanism that cannot keep its state so; for weights of less than float32
    where no step can be fused, or with a state_dtype; TypeError for what is no number.
    """
    begun = prepare_inputs(model, prompt, **options)
    check_recurrent(model)
    return _recurrent(model, begun)


class GenerationInputs(NamedTuple):
    """What generation was asked for, checked. tokens [b t] are the first ones, the start symbol included;
    mask [b t] says which of them are real (None: all).
    """

    tokens: Tensor
    mask: Tensor | None
    source: Tensor | None
    source_mask: Tensor | None
    sampler: Sampler
    steps: int
    uniforms: Iterator[Tensor]
    state_dtype: torch.dtype | None
    weights: Weights

    def memory(self, model: Decoder) -> list[Any]:
        """What the model remembers of the source, if it is one that reads a source."""
        if self.source is None:
            return []
        assert isinstance(model, Seq2Seq)
        return [model.encode_memory(self.source, self.source_mask)]


@torch.no_grad()
def _recurrent(model: Decoder, begun: GenerationInputs) -> Iterator[Tensor]:
    with evaluation(model):
        memory, tokens, mask = begun.memory(model), begun.tokens, begun.mask
        state = model.start(*memory) if memory else None
        extend = model.extend
        for uniform in begun.uniforms:
            params, state = extend(tokens, state, mask=mask)
            token = begun.sampler.draw(model.output, last(params, mask), uniform)
            yield token
            if tokens is begun.tokens and begun.steps > 1:  # all behind the prompt are alike
                state = cast_state(model, state, begun.state_dtype)
                extend = _one_by_one(model, token[:, None], state, begun)
            tokens, mask = token[:, None], None


def _one_by_one(model: Decoder, tokens: Tensor, state: Any, begun: GenerationInputs) -> cuda_graph.Extend:
    """How the tokens behind the prompt come: fused on a CPU, recorded on a GPU, or by `model.extend`."""
    steps = begun.steps - 1
    fusible = (
        steps >= native_decode.MIN_STEPS
        and begun.state_dtype is None
        and native_decode.why_not(model) is None
    )
    if begun.weights != "float32" or fusible:
        return native_decode.Fused(model, state, begun.weights)
    return cuda_graph.extend_of(model, tokens, state, steps)


@torch.no_grad()
def _recomputed(model: Decoder, begun: GenerationInputs) -> Iterator[Tensor]:
    with evaluation(model):
        memory, tokens, mask = begun.memory(model), begun.tokens, begun.mask
        for uniform in begun.uniforms:
            params = model(tokens, *memory, mask=mask)
            token = begun.sampler.draw(model.output, last(params, mask), uniform)
            yield token
            tokens = torch.cat((tokens, token[:, None]), 1)
            mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), 1)


def _collect(tokens: Iterator[Tensor], model: Decoder, prompt: Tensor | None, options: Options) -> Tensor:
    drawn = list(tokens)
    if drawn:
        return torch.stack(drawn, 1)
    given = next((len(x) for x in (prompt, options.get("source")) if x is not None), None)
    batch = given if given is not None else options.get("batch") or 1
    return torch.empty(batch, 0, dtype=torch.int64, device=reference_param(model).device)


def prepare_inputs(
    model: Decoder,
    prompt: Tensor | None,
    *,
    steps: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    batch: int | None = None,
    lengths: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    weights: Weights = "float32",
) -> GenerationInputs:
    """Checks what is asked for; raises what `stream` says."""
    if not isinstance(model, Decoder):
        raise TypeError(f"model must be a Decoder or a Seq2Seq, got {type(model).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps must be an integer of at least 0, got {steps}")
    if state_dtype is not None:
        for block in model.blocks:
            block.attn.attention.check_state_dtype(state_dtype)
    fields.check_one("batch", int | None, batch)
    fields.check_one("seed", int | None, seed)
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must have at most 64 bits, got {seed}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch must be at least 1 sequence, got {batch}")
    if weights != "float32":
        native_decode.check_weights(model, weights)
        if state_dtype is not None:
            raise ValueError(
                f"a fused step keeps its sums in float32: weights={weights!r} needs state_dtype=None"
            )
    device = reference_param(model).device
    if isinstance(model, Seq2Seq):
        if source is None:
            raise ValueError("a Seq2Seq model needs a source")
        source, source_mask = source.to(device), None if source_mask is None else source_mask.to(device)
        try:
            model.encoder.check_input(source, source_mask)
        except (ValueError, TypeError) as error:
            raise type(error)(f"source does not fit: {error}") from error
        if batch not in (None, len(source)):
            raise ValueError(f"batch must be that of the source, {len(source)}, or None; got {batch}")
        batch = len(source)
    elif source is not None:
        raise ValueError(f"source goes with a Seq2Seq model, this one is a {type(model).__name__}")
    elif source_mask is not None:
        raise ValueError("source_mask belongs to a source, and there is none")
    if prompt is None:
        if lengths is not None:
            raise ValueError("lengths belong to a prompt, and there is none")
        prompt = torch.empty(1 if batch is None else batch, 0, dtype=torch.int64, device=device)
    elif not isinstance(prompt, Tensor):
        raise TypeError(f"prompt must be a tensor of integers [b t], got {type(prompt).__name__}")
    elif prompt.dim() != 2 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        raise ValueError(f"prompt must be integers [b t], got {prompt.dtype} of shape {list(prompt.shape)}")
    elif batch not in (None, len(prompt)):
        whose = "of the prompt" if source is None else "of the prompt and of the source"
        raise ValueError(f"batch must be that {whose}, {len(prompt)}, or None; got {batch}")
    if lengths is not None and not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor of integers [b], got {type(lengths).__name__}")
    if lengths is not None and tuple(lengths.shape) != (len(prompt),):
        raise ValueError(f"lengths must be [{len(prompt)}], one a prompt, got {list(lengths.shape)}")
    tokens = prompt.to(device, torch.int64)
    mask = None if lengths is None else lengths_to_mask(lengths.to(device), tokens.shape[1])
    real = tokens if mask is None else tokens[mask]
    checks.symbols("prompt", real.cpu(), model.config.vocabulary - 1)  # the start symbol is none of them
    if model.start_token is not None:
        tokens = torch.cat((tokens.new_full((len(tokens), 1), model.start_token), tokens), 1)
        mask = None if mask is None else torch.cat((mask.new_ones(len(mask), 1), mask), 1)
    elif tokens.shape[1] == 0 or (mask is not None and not bool(mask.any(1).all())):
        raise ValueError("this model has no start symbol: every prompt must have at least one token")
    longest = tokens.shape[1] if mask is None else int(mask.any(0).sum())
    model.check_reach(longest + steps - 1)  # the last token is not read
    return GenerationInputs(
        tokens,
        mask,
        source,
        source_mask,
        Sampler(temperature=temperature, top_k=top_k, top_p=top_p),
        steps,
        _uniforms(steps, tokens, seed),
        state_dtype,
        weights,
    )


def check_recurrent(model: Decoder) -> None:
    """Raises ValueError for a decoder that has no state to go on from."""
    for block in model.blocks:
        attention = block.attn.attention
        if not attention.can.recurrent:
            raise ValueError(
                f"attention {attention.name!r} has no recurrent form with {attention.config}: "
                "lintra.generation.sampling.generate_reference recomputes the whole sequence for every token"
            )


def cast_state(model: Decoder, state: DecoderState, dtype: torch.dtype | None) -> DecoderState:
    """The state with the sums of keys times values kept in `dtype` from here on, bfloat16; None: as they are.

    Half the memory; on a GPU the linear sum's step also moves half as much. A token is computed in float32
    and kv is rounded to the nearest once a token, so that what a token adds is lost beside a sum some 500
    times as large. Bad for sums that never decay (linear, cosformer, performer): after a few hundred tokens
    they fall behind, in the end they stand still. For mechanisms that forget within some tens of tokens
    (gated, delta, fast retention): docs/performance.md has the errors, benchmarks/drift.py measures them.
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


def _uniforms(steps: int, tokens: Tensor, seed: int | None) -> Iterator[Tensor]:
    """One number in [0, 1) for each sequence and step, the same on every device."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    for _ in range(steps):
        yield torch.rand(len(tokens), dtype=torch.float64, generator=generator)


def last(params: Tensor, mask: Tensor | None) -> Tensor:
    """The parameters after the last real token of each sequence, [b t p] -> [b p]."""
    if mask is None:
        return params[:, -1]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
    return params[torch.arange(len(params), device=params.device), last]


# Models in use by `evaluation`: by how many, and which of their modules are to train afterwards. The lock can
# be taken again inside, where the garbage collector may end a stream that was dropped.
_EVALUATED: dict[nn.Module, list[Any]] = {}
_LOCK = threading.RLock()


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside; afterwards, once all that use the model so are done, as it was."""
    with _LOCK:
        entry = _EVALUATED.setdefault(model, [0, []])
        entry[0] += 1
        entry[1] += [module for module in model.modules() if module.training]
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            entry[0] -= 1
            if not entry[0]:
                del _EVALUATED[model]
                for module in entry[1]:
                    module.training = True

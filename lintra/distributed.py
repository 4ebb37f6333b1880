"""Context parallelism: one sequence over several processes of torch.distributed, each with a shard of it.

mesh = init_device_mesh("cpu", (2,))                      under torchrun
context_parallel(model, mesh)
torch.manual_seed(1 + mesh.get_rank())                    for dropout: other masks on each rank
tokens, targets = shard(model.shift(text), mesh), shard(text, mesh)
loss = cross_entropy(model(tokens).mT, targets, reduction="sum") / text.numel()
loss.backward()
reduce_gradients(model, mesh)
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lintra.agreement import check_alike, gather_objects
from lintra.attention import Attention, State
from lintra.models import Decoder
from lintra.models.base import TransformerBase
from lintra.nn import AttentionLayer
from lintra.nn.context_cost import Choice, Machine, choose
from lintra.nn.context_parallel import ContextParallel, Method, check_reach
from lintra.ops import checks
from lintra.ops.layout import Layout
from lintra.ops.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def context_parallel(
    model: Module, mesh: "DeviceMesh", *, method: Literal["auto", "relay", "scan"] = "auto"
) -> Module:
    """Have a model's `forward` take, on each rank of a mesh of one axis, that rank's shard of every sequence.

    Changes `model` in place, a `Decoder` or a module of your own around `AttentionLayer`, and returns it.
    The result is that of one process with whole sequences. Shards come from `shard`, of tokens, targets and
    masks alike, or for packed batches from `shard_packed`; losses are then sums over the tokens of a rank,
    and `reduce_gradients` adds the gradients of all ranks. `model.extend` and generation stay as they were;
    shards after a state go through `extend` of this module.
    method: "relay" passes states from rank to rank, each waiting for the one before (`lintra.nn.relay`);
    "scan" has all ranks exchange the effects of their shards (`lintra.ops.sequence_shard`), where a mechanism
    can; "auto" takes the one that is predicted to be faster, which `explain` shows.
    For dropout, give each rank a seed of its own afterwards, or all shards have the same masks. The generator
    for `lintra.attention.redraw` must be the same on all ranks.
    Every rank must call this, with the same model. Raises ValueError for a mechanism that is not causal, has
    no recurrent form or lets later tokens decide what a token sees, for other networks of lintra.models, and
    on all ranks for a model that is not the same on all of them. `forward` then raises it, on all ranks, for
    shards of different batches and more tokens than the model has positions.
    """
    if method not in ("auto", *get_args(Method)):
        raise ValueError(f"method must be 'auto', 'relay' or 'scan', got {method!r}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one axis, such as mesh['context'], got {mesh.ndim}")
    check_alike("the model", {"method": method, **_settings(model)}, mesh.get_group())
    parts = _parts(model)
    numbers = {name: _words(x) for name, x in model.state_dict().items()}
    check_alike(
        "seed all ranks alike, or load one checkpoint: the model's numbers", numbers, mesh.get_group()
    )
    ranks = Ranks(mesh.get_group())

    def methods(model: nn.Module, rows: int, tokens: int) -> dict[nn.Module, Method]:
        return {x: each.method for x, each in choose(model, ranks.size, rows, tokens, method).items()}

    context = ContextParallel(ranks, model, methods)
    for module in parts:
        module.context_parallel = context
    model.register_forward_pre_hook(context.begin)
    return model


def explain(
    model: nn.Module,
    *,
    ranks: int,
    tokens: int,
    rows: int = 1,
    method: Literal["auto", "relay", "scan"] = "auto",
    machine: Machine | None = None,
) -> list[Choice]:
    """Return how each layer of a model would get what precedes a rank's shard, and why.

    For `rows` sequences of `tokens` over so many ranks; no process is started. machine: speeds to predict
    with, by default rough ones of the model's device. Raises ValueError as `context_parallel` and `shard`
    do."""
    _parts(model)
    if not 1 <= ranks <= tokens or rows < 1:
        raise ValueError(
            f"a sequence needs a token for each rank, got ranks={ranks}, tokens={tokens} and rows={rows}"
        )
    return list(choose(model, ranks, rows, -(-tokens // ranks), method, machine).values())


def extend(
    model: nn.Module,
    x: Tensor,
    state: State | None = None,
    *,
    mask: Bool[Tensor, "b t"] | None = None,
    **extra: Tensor,
) -> tuple[Tensor, State]:
    """Return what `model.extend` gives for this rank's shard x [b t ...] of sequences after a state, and the
    state after all shards, on every rank.

    model: of `context_parallel`; one of your own has a method `extend(x, state, mask=...)` that calls those
    of its layers, and takes None for the state before any token. state: before the first shard (None: before
    any token); that of rank 0 counts, and other ranks may leave it out. mask and extra are shards, too.
    Layers hand states from rank to rank, whatever the method of `forward`. Gradients reach the state on
    rank 0; a rank must have y or the next state in its loss for the others to go on, and PyTorch refuses to
    change either in place before the backward.
    Every rank must call this. Raises ValueError on all of them for a state, a shard or a mask that does not
    fit on one, packed sequences, shards of different batches, and more tokens than the model has positions.
    """
    found = (getattr(x, "context_parallel", None) for x in model.modules())
    context = next((x for x in found if x is not None), None)
    if not isinstance(context, ContextParallel):
        raise ValueError(f"extend needs a model of context_parallel, got {type(model).__name__} without")
    state = None if context.ranks.rank else state
    _check_shards(model, context.ranks, x, state, mask, extra)
    context.ranks.release_sent()
    with context.shards_in_extend():
        y, after = cast("Any", model).extend(x, state, mask=mask, **extra)
    return context.relay.share(y, after)


def shard(x: Tensor, mesh: "DeviceMesh") -> Tensor:
    """Return this rank's shard of a whole tensor [b t ...] along the time.

    The first ranks get one token more where their number does not divide the length. Raises ValueError for
    fewer tokens than ranks."""
    first, end = _bounds(x.shape[1], mesh)
    return x[:, first:end]


def shard_packed(cu_seqlens: Int[Tensor, "bounds"], mesh: "DeviceMesh") -> Layout:
    """Return the layout of this rank's shard of a packed batch [1 t ...], which models take for `cu_seqlens`.

    The first of its sequences may have begun on an earlier rank. Raises ValueError as `shard` does, and
    unless cu_seqlens is [n+1], from 0 without decreasing."""
    checks.shape("cu_seqlens", cu_seqlens, "n", {})
    places = cu_seqlens.tolist()
    if not places or places[0] != 0 or any(b < a for a, b in pairwise(places)):
        raise ValueError(f"cu_seqlens must begin with 0 and not decrease, got {places}")
    first, end = _bounds(places[-1], mesh)
    inside = [place - first for place in dict.fromkeys(places) if first < place < end]
    bounds = torch.tensor([0, *inside, end - first], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    layout = Layout(1, end - first, cu_seqlens.device, cu_seqlens=bounds)
    layout.begun, layout.unfinished = first not in places, end not in places
    return layout


def gather(x: Tensor, mesh: "DeviceMesh") -> Tensor:
    """Return the shards [b t ...] of all ranks as one tensor, on every rank. No gradient passes."""
    group = mesh.get_group()
    x = x.detach().transpose(0, 1).contiguous()
    length = torch.tensor([x.shape[0]], device=x.device)
    lengths = [torch.zeros_like(length) for _ in range(mesh.size())]
    dist.all_gather(lengths, length, group=group)
    parts = [x.new_empty(int(n), *x.shape[1:]) for n in lengths]
    longest = max(len(part) for part in parts)  # gloo gathers tensors of one size alone
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    found = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(found, padded, group=group)
    return torch.cat([y[: len(part)] for y, part in zip(found, parts, strict=True)]).transpose(0, 1)


def reduce_gradients(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Add the gradients of all ranks, of losses that are sums over the tokens of a rank.

    A parameter without a gradient on this rank counts as one of 0."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=mesh.get_group())


def _bounds(length: int, mesh: "DeviceMesh") -> tuple[int, int]:
    """Return where this rank's shard begins and ends."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    if length < ranks:
        raise ValueError(f"a sequence needs a token for each of {ranks} ranks, got {length}")
    each, more = divmod(length, ranks)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


def _parts(model: nn.Module) -> list[AttentionLayer | Decoder]:
    """Return the parts of a model that support shards. Raises ValueError for a model that cannot be made
    parallel."""
    networks = [x for x in model.modules() if isinstance(x, TransformerBase)]
    others = [x for x in networks if x is not model or type(x) is not Decoder]
    if others:
        raise ValueError(
            f"model must be a Decoder or a module around AttentionLayer, got {type(model).__name__}: "
            f"{type(others[0]).__name__} does not know where the shard of a sequence begins"
        )
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            _check(name, module, model)
    parts = [module for module in model.modules() if isinstance(module, (AttentionLayer, Decoder))]
    if not parts:
        raise ValueError(f"{type(model).__name__} has no lintra.nn.AttentionLayer to be made parallel")
    return parts


def _check(name: str, attention: Attention, model: nn.Module) -> None:
    """Raise ValueError unless a layer's state before a token determines all that came before it."""
    parent = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(parent, AttentionLayer):
        raise ValueError(f"{name} must be within a lintra.nn.AttentionLayer, got {type(parent).__name__}")
    if not attention.causal:
        raise ValueError(f"{name} must be causal: states pass from one rank to the next only")
    if not attention.can.recurrent or attention.can.lookahead:
        why = "has no recurrent form" if not attention.can.recurrent else "lets later tokens decide"
        raise ValueError(f"{name} cannot hand on its state: attention {attention.name!r} {why}")


def _check_shards(
    model: nn.Module,
    ranks: Ranks,
    x: Tensor,
    state: State | None,
    mask: Tensor | None,
    extra: dict[str, Tensor],
) -> None:
    """Raise ValueError, on all ranks, unless they have shards that the model can extend the state by.

    Each rank tries a shard without tokens alone, which fails for anything that does not fit."""
    counts, problem, cause = [], None, None
    try:
        if extra.get("cu_seqlens") is not None:
            raise ValueError("packed sequences cannot be extended over ranks")
        layout = Layout.of("x", x, mask)
        none = None if mask is None else mask[:, :0]
        with torch.no_grad():
            parts = {name: each[:, :0] for name, each in extra.items() if each is not None}
            cast("Any", model).extend(x[:, :0], state, mask=none, **parts)
        if isinstance(model, Decoder):
            model.check_symbols(layout.zero(x))
        new = torch.as_tensor(layout.new, device=x.device).expand(layout.n)
        counts = (new + getattr(state, "seen", 0)).tolist()
    except Exception as error:  # of any kind: the others wait
        kind = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
        problem, cause = f"{kind}{error}", error
    found = gather_objects((problem, counts), ranks.group)
    for rank, (told, _) in enumerate(found):
        if told is not None:
            raise ValueError(f"rank {rank} cannot extend the state: {told}") from cause
    if len({len(each) for _, each in found}) > 1:
        rows = ", ".join(f"{len(each)} on rank {rank}" for rank, (_, each) in enumerate(found))
        raise ValueError(f"all ranks must have shards of the same sequences, got {rows}")
    check_reach(model, max((sum(row) for row in zip(*(each for _, each in found), strict=True)), default=0))


def _settings(model: nn.Module) -> dict[str, Any]:
    """Return what the models of all ranks must have in common: parameters and settings."""
    parts = {name: f"{list(x.shape)} {x.dtype}" for name, x in model.state_dict().items()}
    having = {name: x for name, x in model.named_modules() if hasattr(x, "config")}
    return parts | {f"{name}.config": f"{x.config}" for name, x in having.items()}


def _words(x: Tensor) -> int | None:
    """Return the sum of a tensor's bits as whole numbers, the same in any order; None of a tensor
    without numbers, and of one that is sharded."""
    if x.is_meta or isinstance(x, DTensor):
        return None
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = x.detach().contiguous().reshape(-1).view(kinds.get(x.element_size(), torch.int64))
    return int(bits.sum(dtype=torch.int64))

"""Linear attention in Triton, for NVIDIA GPUs: cuts a call into spans and launches `triton_kernels`.

Only the inputs, y, what it lost when it was rounded, and the denominators are kept for the backward pass,
which sums the states again. No value is read back from the GPU, so a call can be captured in a CUDA graph
once an earlier one has compiled its kernels.
A kv of 16 bits is widened outside the kernels, except by a step, which reads and writes it directly.
Products of 32-bit numbers follow PyTorch's setting for TF32. Inputs of 16 bits are multiplied as they are;
what is computed from them is multiplied as sums of two bfloat16, which keep 16 bits.
Warps and stages are those that were fastest when a kind of call was first seen, kept in TRITON_CACHE_DIR. The
environment variable LINTRA_TRITON_CONFIG fixes them, as in "8,1", to repeat a run or to compare.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra.ops.dispatch import INTERPRETED
from lintra.ops.linear_attention import operator

# Larger blocks do not fit into registers or, on small GPUs, into shared memory. Without tensor cores blocks
# are half as large, because every thread then holds whole rows of what it multiplies.
CHUNK = 64  # tokens per chunk: scores are CHUNK x CHUNK
WIDEST = 64  # features or values per tile
LEAST = 16  # the fewest of either that a matrix product takes
LONGEST = 16  # chunks per span, at most: longer spans move fewer states through memory
SCAN = 1024  # entries of a state per program
GONE = -200.0  # the logarithm of a decay that leaves nothing, whatever the weight of an input in float32
ROWS = 64  # rows per program of a kernel without matrix products
# Triton keeps the arguments on the kernel object while it tunes, where two threads would mix them up.
_LAUNCHING = threading.Lock()


class Cut(NamedTuple):
    """The sequences of a call, cut into spans; no span has tokens of two sequences."""

    units: int  # number of spans; an upper bound for packed sequences, whose lengths are not read back
    spans: int  # per sequence, if all have the same length
    sequence_of: Tensor | None  # [units] if they are packed: the sequence of each span
    first_of: Tensor | None  # [n+1] if they are packed: the first span of each sequence


def cut(n: int, time: int, span: int, cu_seqlens: Tensor | None) -> Cut:
    """Cut n sequences of `time` tokens, or n packed into a row of `time`, into spans of `span` tokens."""
    if cu_seqlens is None:
        spans = -(-time // span)
        return Cut(n * spans, spans, None, None)
    units = (time + n * (span - 1)) // span if n else 0
    ends = ((cu_seqlens.diff() + span - 1) // span).cumsum(0)
    sequence_of = torch.searchsorted(ends, torch.arange(units, device=ends.device), right=True)
    first_of = torch.cat((ends.new_zeros(1), ends))
    return Cut(units, 0, sequence_of.clamp_(max=max(n - 1, 0)), first_of)


def bounded(cu_seqlens: Tensor, time: int) -> Tensor:
    """Keep offsets within the row and in order: wrong ones are not refused, as the host never reads them."""
    return cu_seqlens.to(torch.int64).clamp(0, time).cummax(0).values


def _limited(log_decay: Tensor | None) -> Tensor | None:
    """Return log decays of at least GONE: the difference of two sums of -inf would be NaN."""
    return None if log_decay is None else log_decay.clamp(min=GONE)


class _Call:
    """One call of the operator or of its backward: sizes, and the arguments that kernels share."""

    def __init__(
        self, q, k, v, log_decay, log_input, kv, z, mask, cu_seqlens, causal, normalize, eps, feature_map
    ):
        self.b, self.t, self.h, self.f = q.shape
        self.s, self.g, self.e = v.shape[1:]
        self.n = kv.shape[0]
        self.q, self.k, self.v = (rows_of(x) for x in (q, k, v))
        self.kv, self.z = kv.contiguous(), z.contiguous()
        self.logarithms = {
            name: None if x is None else x.contiguous()
            for name, x in (("log_decay", _limited(log_decay)), ("log_input", log_input))
        }
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.cu_seqlens = None if cu_seqlens is None else bounded(cu_seqlens, max(self.t, self.s))
        self.causal, self.normalize, self.eps = causal, normalize, eps
        self.map = feature_map or "none"
        half = q.dtype != torch.float32
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        if half and not INTERPRETED:
            self.precision = "split"
        else:
            self.precision = "tf32" if half or tf32_allowed() else "ieee"
        self.exact = self.precision == "split" and feature_map not in ("elu+1", "exp")
        wanted = target_programs(q)
        part = 2 if self.precision == "ieee" else 1
        self.tile_f, self.tile_e = (block(width, WIDEST // part) for width in (self.f, self.e))
        self.tiles_f, self.tiles_e = -(-self.f // self.tile_f), -(-self.e // self.tile_e)
        self.chunk = block(max(self.t, self.s), CHUNK // part)
        self.resident = self.tiles_f == self.tiles_e == 1
        chunks = self.n + max(self.t, self.s) * self.b // self.chunk
        enough = min(LONGEST, chunks * self.g // wanted)
        # A power of 2: other numbers gain little, and lengths differ from call to call.
        self.span = self.chunk * (2 ** (max(1, enough).bit_length() - 1) if self.resident else 1)
        self.serial = causal and not self.resident and self.n * self.g * self.tiles_f * self.tiles_e >= wanted
        self.queries = cut(self.n, self.t, self.span, self.cu_seqlens)
        self.keys = self.queries if causal else cut(self.n, self.s, self.span, self.cu_seqlens)

    def side(self, queries: bool) -> dict[str, Any]:
        """Return the arguments of a kernel that goes through the queries, or else through the keys."""
        spans = self.queries if queries else self.keys
        there = self.causal or not queries  # logarithms and the mask belong to the keys
        return {
            "mask": self.mask if there else None,
            "cu_seqlens": self.cu_seqlens,
            "sequence_of": spans.sequence_of,
            "first_of": spans.first_of,
            "spans": spans.spans,
            "time": self.t if queries else self.s,
            "SPAN": self.span,
            "G": self.g,
            "READERS": self.h // self.g,
            **(self.logarithms if there else {"log_decay": None, "log_input": None}),
        }

    def constants(self) -> dict[str, Any]:
        return {
            "F": self.f,
            "E": self.e,
            "BF": self.tile_f,
            "BE": self.tile_e,
            "C": self.chunk,
            "MAP": self.map,
            "CAUSAL": self.causal,
            "RESIDENT": self.resident,
            "PRECISION": self.precision,
            "EXACT": self.exact,
        }

    def sum_states(self, start: tuple[Tensor | None, Tensor | None], gradient: dict[str, Any] | None = None):
        """Return the states that spans start from [units g f*(e+1)] (not causal: [n g f*(e+1)]), and the
        final kv and z. Given the arguments that its `gradient` is computed from, return the same of the
        state's gradient, backwards in time."""
        from lintra.ops.linear_attention import triton_kernels as kernels

        backward = gradient is not None
        spans = self.queries if backward else self.keys
        size = self.f * (self.e + 1)
        like = {"dtype": torch.float32, "device": self.q.device}
        states = torch.empty((spans.units, self.g, size), **like)
        kv, z = torch.empty(self.kv.shape, **like), torch.empty(self.z.shape, **like)
        decays = None if self.logarithms["log_decay"] is None else torch.empty((spans.units, self.g), **like)
        ends = {"start_kv": start[0], "start_z": start[1], "final_kv": kv, "final_z": z}
        arguments = self.side(backward)
        if gradient is None:
            arguments |= strided("a", self.k) | strided("c", self.v) | {"denominator": None, "dd": None}
        else:
            arguments |= strided("a", self.q) | gradient | {"log_input": None}
        if self.serial:
            arguments["SPAN"] = max(self.t, 1)
        launch(
            kernels.sum_spans,
            ((self.n if self.serial else spans.units) * self.g * self.tiles_f * self.tiles_e,),
            **arguments | {"READERS": self.h // self.g if backward else 1},
            **self.constants(),
            **ends,
            states=states,
            decays=decays,
            BACKWARD=backward,
            SERIAL=self.serial,
        )
        if not self.serial:
            launch(
                kernels.scan_spans,
                (self.n, self.g, -(-size // SCAN)),
                states=states,
                decays=decays,
                **ends,
                first_of=spans.first_of,
                spans=spans.spans,
                G=self.g,
                F=self.f,
                E=self.e,
                BLOCK=SCAN,
                BACKWARD=backward,
            )
        if not self.causal:
            states = torch.cat((kv.flatten(2), z), 2)
        return states, kv, z


def forward(q, k, v, *others):
    *others, save_lost = others
    save_lost = save_lost and v.dtype.itemsize == 2
    with on_device(q):
        call = _Call(q, k, v, *others)
        y = result((*q.shape[:3], v.shape[3]), v.dtype, q, call.cu_seqlens)
        denominator = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        results = {"y": y, "denominator": denominator, "eps": call.eps, "NORMALIZE": call.normalize}
        lost = result(y.shape, y.dtype, q, call.cu_seqlens) if save_lost else y.new_empty(0)
        results["lost"] = lost if save_lost else None
        if call.causal and call.t == 1 and call.cu_seqlens is None:
            return y, *_step(call, results), denominator, lost
        from lintra.ops.linear_attention import triton_kernels as kernels

        states, wide, z = call.sum_states((call.kv.float(), call.z))
        launch(
            kernels.outputs,
            (call.queries.units * call.h * call.tiles_e,),
            **strided("q", call.q),
            **strided("k", call.k),
            **strided("v", call.v),
            **call.side(True),
            **call.constants(),
            **results,
            states=states,
        )
        return y, wide.to(call.kv.dtype), z, denominator, lost


def _step(call: _Call, results: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Process one token, in a single launch."""
    from lintra.ops.linear_attention import triton_kernels as kernels

    kv, z = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.kv, call.z))
    given: dict[str, Any] = {}
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        given |= {name: x, f"{name}_batch": x.stride(0), f"{name}_head": x.stride(2)}
    launch(
        kernels.step,
        (call.b, call.h, call.tiles_e),
        **given,
        **call.logarithms,
        **results,
        mask=call.mask,
        kv=call.kv,
        z=call.z,
        kv_out=kv,
        z_out=z,
        G=call.g,
        READERS=call.h // call.g,
        F=call.f,
        E=call.e,
        BF=call.tile_f,
        BE=call.tile_e,
        MAP=call.map,
    )
    return kv, z


def backward(dy, dkv, dz, q, k, v, y, denominator, lost, *others):
    from lintra.ops.linear_attention import triton_gradients as kernels

    with on_device(q):
        call = _Call(q, k, v, *others)
        like = {"dtype": torch.float32, "device": q.device}
        dy, y, denominator = rows_of(dy), y.contiguous(), denominator.contiguous()
        dkv, dz = (None if x is None else x.float().contiguous() for x in (dkv, dz))
        dd = torch.empty(denominator.shape, **like)
        launch(
            kernels.denominator_gradients,
            (-(-denominator.numel() // ROWS),),
            **strided("dy", dy),
            y=y,
            lost=lost.contiguous() if lost.numel() else None,
            mask=call.side(True)["mask"],
            dd=dd,
            rows=denominator.numel(),
            time=call.t,
            H=call.h,
            E=call.e,
            BE=call.tile_e,
            C=ROWS,
            NORMALIZE=call.normalize,
        )
        rows = {"denominator": denominator, "dd": dd}
        past, kv, z = call.sum_states((call.kv.float(), call.z))
        future, dkv_in, dz_in = call.sum_states((dkv, dz), strided("c", dy) | rows)

        tensors = strided("q", call.q) | strided("k", call.k) | strided("dy", dy)
        values = strided("v", call.v)
        dq, dk, dv = (result(x.shape, x.dtype, x, call.cu_seqlens) for x in (q, k, v))
        decays, inputs = (x is not None for x in call.logarithms.values())
        query_dots = torch.empty((call.tiles_f, *q.shape[:3]), **like) if decays else None
        key_dots = torch.empty((call.tiles_f, *k.shape[:3]), **like) if decays or inputs else None
        launch(
            kernels.query_gradients,
            (call.queries.units * call.h * call.tiles_f,),
            **tensors,
            **values,
            **rows,
            **call.side(True),
            **call.constants(),
            states=past,
            dq=dq,
            dots=query_dots,
            rows=denominator.numel(),
        )
        launch(
            kernels.key_gradients,
            (call.keys.units * call.g * call.tiles_f,),
            **tensors,
            **values,
            **rows,
            **call.side(False),
            **call.constants(),
            states=future,
            dk=dk,
            dots=key_dots,
            rows=call.b * call.s * call.g,
        )
        launch(
            kernels.value_gradients,
            (call.keys.units * call.g * call.tiles_e,),
            **tensors,
            **call.side(False),
            **call.constants(),
            denominator=denominator,
            states=future,
            dv=dv,
        )
        logarithms = (None, None)
        if decays or inputs:
            states = {"past": past, "final_kv": kv, "final_z": z, "future": future}
            logarithms = _logarithm_gradients(call, query_dots, key_dots, states)
        return dq, dk, dv, *logarithms, dkv_in.to(call.kv.dtype), dz_in


def _logarithm_gradients(
    call: _Call, query_dots: Tensor | None, key_dots: Tensor | None, states: dict[str, Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of log_decay and log_input [b s g], each None if it was not given."""
    from lintra.ops.linear_attention import triton_gradients as kernels

    made = [
        None if x is None else result(x.shape, torch.float32, x, call.cu_seqlens)
        for x in call.logarithms.values()
    ]
    arguments = {name: x for name, x in call.side(False).items() if name not in call.logarithms}
    launch(
        kernels.logarithm_gradients,
        (call.keys.units * call.g,),
        query_dots=query_dots,
        key_dots=key_dots,
        **arguments,
        **states,
        dlog_decay=made[0],
        dlog_input=made[1],
        rows=call.b * call.s,
        F=call.f,
        E=call.e,
        BLOCK=SCAN,
        TILES=call.tiles_f,
        C=min(call.span, 256),
    )
    return tuple(made)


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch a kernel, from one thread at a time. An empty grid launches nothing."""
    if all(grid):
        with _LAUNCHING:
            kernel[grid](**arguments)


def result(shape: Sequence[int], dtype: torch.dtype, like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Allocate what kernels write to, on the device of `like`: zeros if sequences are packed, as they may end
    before the row does."""
    make = torch.empty if cu_seqlens is None else torch.zeros
    return make(shape, dtype=dtype, device=like.device)


def strided(name: str, x: Tensor) -> dict[str, Any]:
    """Return a tensor [b t h width] with contiguous rows as the arguments of a kernel."""
    batch, token, head, _ = x.stride()
    return {name: x, f"{name}_batch": batch, f"{name}_token": token, f"{name}_head": head}


def rows_of(x: Tensor) -> Tensor:
    """Return x with its last axis contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the GPU of `x` the current one, on which kernels start."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def target_programs(x: Tensor) -> int:
    """Return how many programs keep the GPU busy. (The interpreter runs one after another.)"""
    return 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def block(size: int, most: int) -> int:
    """Return the power of 2 that holds `size`, from LEAST to `most`; what is larger is cut into tiles."""
    return max(LEAST, min(1 << (max(size, 1) - 1).bit_length(), most))


def tf32_allowed() -> bool:
    setting = torch.backends.cuda.matmul
    precision = getattr(setting, "fp32_precision", None)  # the newer of the two settings; reading both raises
    return bool(setting.allow_tf32) if precision is None else precision == "tf32"


linear_attention_triton = operator.register(
    "linear_attention_triton", "triton", forward, backward, ["CUDA", "CPU"]
)

"""The recurrences without a denominator in Triton, for NVIDIA GPUs: launches `triton_recurrence_kernels`.

If asked to save, the forward keeps P and T for the backward pass, which sums the states of chunks again. No
value is read back from the GPU. Products of float32 follow the setting for TF32, as in `triton`, except those
that invert the triangle: where others are TF32, each of these is made of three TF32 products ("tf32x3"),
which lose next to nothing. With inputs of 16 bits, what is computed from them is multiplied in TF32 whatever
the setting.
"""

from typing import Any

import torch
from torch import Tensor

from lintra.native.recurrence import grouped
from lintra.ops.linear_attention import operator
from lintra.ops.linear_attention.triton import (
    LEAST,
    block,
    bounded,
    cut,
    launch,
    on_device,
    result,
    rows_of,
    strided,
    target_programs,
    tf32_allowed,
)

CHUNK = 64  # tokens per chunk
WIDEST = 64  # features or values per tile
STATE = 8192  # entries of a state per program that carries them through a sequence
NARROW = 128  # with more features, a chunk is half as long, so that its rows fit beside the state


def _precision(q: Tensor) -> str:
    return "tf32" if q.dtype != torch.float32 or tf32_allowed() else "ieee"


def _chunk(q: Tensor) -> int:
    """Return the tokens per chunk: half without tensor cores, where every thread holds whole rows of what it
    multiplies, and half with more than NARROW features."""
    half = (_precision(q) == "ieee") + (q.shape[3] > NARROW)
    return max(LEAST, CHUNK >> half)


class _Call:
    """One call of the operator or of its backward: sizes, and the arguments that kernels share."""

    def __init__(self, q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, chunk):
        self.b, self.t, queries, self.f = q.shape
        keys, (values, self.e) = k.shape[2], v.shape[2:]
        self.g = max(keys, values)
        self.h = max(queries, self.g)
        self.n = state.shape[0]
        self.q, self.k, self.v = (rows_of(x) for x in (q, k, v))
        self.log_decay, self.beta = (None if x is None else x.contiguous() for x in (log_decay, beta))
        self.state, self.scale = state.contiguous(), scale
        self.q_share, self.k_share = self.h // queries, self.g // keys
        self.v_share = self.g // values
        self.decay = "none" if log_decay is None else "feature" if log_decay.dim() == 4 else "head"
        half = q.dtype != torch.float32
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        self.exact = half and (q.is_cuda or q.dtype != torch.bfloat16)
        self.precision = _precision(q)
        self.chunk = chunk
        self.cu_seqlens = None if cu_seqlens is None else bounded(cu_seqlens, self.t)
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.spans = cut(self.n, self.t, chunk, self.cu_seqlens)
        part = 2 if self.precision == "ieee" else 1
        self.tile_f, self.tile_e = (block(width, WIDEST // part) for width in (self.f, self.e))
        self.tiles_f, self.tiles_e = -(-self.f // self.tile_f), -(-self.e // self.tile_e)
        self.tile_narrow = block(self.f, WIDEST // 2 // part)  # where many rows are held at once
        self.tiles_narrow = -(-self.f // self.tile_narrow)
        self.all_f = block(self.f, STATE)
        self.column = block(self.e, max(LEAST, min(WIDEST, STATE // self.all_f) // part))
        while self.column > LEAST and 4 * self.n * self.g * -(-self.e // self.column) < target_programs(q):
            self.column //= 2

    def places(self, *, serial: bool = False) -> dict[str, Any]:
        """Return the arguments by which a kernel finds tokens; `serial` if programs go through sequences."""
        given = {
            "mask": self.mask,
            "cu_seqlens": self.cu_seqlens,
            "first_of": self.spans.first_of,
            "spans": self.spans.spans,
            "time": self.t,
            "G": self.g,
            "F": self.f,
            "E": self.e,
            "C": self.chunk,
            "DECAY": self.decay,
            "PRECISION": self.precision,
        }
        return given if serial else given | {"sequence_of": self.spans.sequence_of}

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)

    def result(self, *shape: int) -> Tensor:
        return result(shape, torch.float32, self.q, self.cu_seqlens)

    def levels(self) -> dict[str, int]:
        return {"LEVELS": self.chunk.bit_length() - 1}

    def each(self, heads: int, width: int) -> Tensor:
        """An uninitialised [b t heads width]."""
        return self.new(self.b, self.t, heads, width)

    def split(self, saved: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return P and T, the two parts of what is kept for the backward pass."""
        scores, triangle = saved.split((self._rows(self.h), saved.numel() - self._rows(self.h)))
        return scores, None if self.beta is None else triangle

    def _rows(self, heads: int) -> int:
        return self.b * self.t * heads * self.chunk

    def fill(self, saved: Tensor) -> None:
        """Compute P and T into `saved`."""
        from lintra.ops.linear_attention import triton_recurrence_kernels as kernels

        scores, triangle = self.split(saved)
        given = strided("k", self.k) | self.places() | self.levels()
        given |= {"log_decay": self.log_decay, "beta": self.beta, "K_SHARE": self.k_share}
        given |= {"BF": self.tile_narrow if self.decay == "feature" else self.tile_f}
        given |= {"EXACT": self.exact, "SOLVED_IN": "ieee" if self.precision == "ieee" else "tf32x3"}
        readers = [(self.q, self.h, self.q_share, scores)]
        if triangle is not None:
            readers.append((self.k, self.g, self.k_share, triangle))
        for i, (x, heads, share, target) in enumerate(readers):
            launch(
                kernels.chunk_scores,
                (self.spans.units * heads,),
                **strided("x", x),
                **given,
                scores=target,
                READERS=heads // self.g,
                X_SHARE=share,
                SOLVE=i == 1,
            )

    def sides(self, triangle: Tensor | None) -> dict[str, Any]:
        """Return the effect of chunks on states, as arguments of the kernels."""
        from lintra.ops.linear_attention import triton_recurrence_kernels as kernels

        decays, delta = self.decay != "none", triangle is not None
        late = self.each(self.g, self.f) if decays else None
        erasing = self.each(self.g, self.f) if delta else None
        new = self.each(self.g, self.e) if delta else None
        whole = self.new(self.spans.units, self.g, self.f) if decays else None
        if decays or delta:
            launch(
                kernels.chunk_sides,
                (self.spans.units * self.g * (self.tiles_f + (self.tiles_e if delta else 0)),),
                **strided("k", self.k),
                **strided("v", self.v),
                **self.places(),
                log_decay=self.log_decay,
                beta=self.beta,
                triangle=triangle,
                late=late,
                erasing=erasing,
                new=new,
                whole=whole,
                K_SHARE=self.k_share,
                V_SHARE=self.v_share,
                BF=self.tile_f,
                BE=self.tile_e,
                DELTA=delta,
            )
        return {
            **strided("late", self.k if late is None else late),
            **strided("new", self.v if new is None else new),
            "erasing": erasing,
            "whole": whole,
            "K_SHARE": self.k_share if late is None else 1,
            "V_SHARE": self.v_share if new is None else 1,
        }

    def states(self, sides: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states before chunks, N and the final states."""
        from lintra.ops.linear_attention import triton_recurrence_kernels as kernels

        delta = self.beta is not None
        states = self.new(self.spans.units, self.g, self.f, self.e)
        written = self.each(self.g, self.e) if delta else None
        final = torch.empty(self.state.shape, dtype=torch.float32, device=self.q.device)
        launch(
            kernels.chunk_states,
            (self.n, self.g, -(-self.e // self.column)),
            **sides,
            **self.places(serial=True),
            start=self.state,
            states=states,
            written=written,
            final=final,
            BF=self.all_f,
            BE=self.column,
            DELTA=delta,
        )
        return states, self.v if written is None else written, final

    def values(self, n: Tensor) -> dict[str, Any]:
        """Return N as the kernels take it; without the delta rule it is v itself."""
        return strided("n", n) | {"V_SHARE": self.v_share if self.beta is None else 1}

    def outputs(self, states: Tensor, n: Tensor, scores: Tensor) -> Tensor:
        from lintra.ops.linear_attention import triton_recurrence_kernels as kernels

        y = result((self.b, self.t, self.h, self.e), self.v.dtype, self.q, self.cu_seqlens)
        launch(
            kernels.outputs,
            (self.spans.units * self.h * self.tiles_e,),
            **strided("q", self.q),
            **self.values(n),
            **self.places(),
            log_decay=self.log_decay,
            states=states,
            scores=scores,
            y=y,
            scale=self.scale,
            READERS=self.h // self.g,
            Q_SHARE=self.q_share,
            BF=self.tile_f,
            BE=self.tile_e,
        )
        return y

    def step(self) -> tuple[Tensor, Tensor]:
        """Return y and the states after a single token."""
        from lintra.ops.linear_attention import triton_recurrence_kernels as kernels

        y = torch.empty((self.b, 1, self.h, self.e), dtype=self.v.dtype, device=self.q.device)
        final = torch.empty_like(self.state)
        given: dict[str, Any] = {}
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            given |= {name: x, f"{name}_batch": x.stride(0), f"{name}_head": x.stride(2)}
        launch(
            kernels.step,
            (self.b, self.g, -(-self.e // self.column)),
            **given,
            log_decay=self.log_decay,
            beta=self.beta,
            mask=self.mask,
            start=self.state,
            final=final,
            y=y,
            scale=self.scale,
            G=self.g,
            READERS=self.h // self.g,
            Q_SHARE=self.q_share,
            K_SHARE=self.k_share,
            V_SHARE=self.v_share,
            F=self.f,
            E=self.e,
            BF=self.all_f,
            BE=self.column,
            DECAY=self.decay,
        )
        return y, final


def saved_size(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Return how many numbers `forward` saves: a row of scores for every output, and of T for every state."""
    g = max(k.shape[2], v.shape[2])
    heads = max(q.shape[2], g) + (0 if beta is None else g)
    return q.shape[0] * q.shape[1] * heads * _chunk(q)


def forward(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, save):
    """Return y, the states after the last tokens and what `backward` needs, empty unless `save`."""
    with on_device(q):
        call = _Call(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, _chunk(q))
        nothing = state.new_empty(0)
        if call.t == 1 and cu_seqlens is None and not save:
            return *call.step(), nothing
        saved = call.new(saved_size(q, k, v, beta, cu_seqlens))
        call.fill(saved)
        scores, triangle = call.split(saved)
        states, n, final = call.states(call.sides(triangle))
        return call.outputs(states, n, scores), final, saved if save else nothing


def backward(dy, dstate, q, k, v, log_decay, beta, saved, state, mask, cu_seqlens, scale):
    """Return the gradients of q, k, v, log_decay, beta and the states before."""
    from lintra.ops.linear_attention import triton_recurrence_gradients as kernels

    with on_device(q):
        chunk = _chunk(q)
        heads = saved_size(q, k, v, beta, cu_seqlens) // chunk
        if saved.numel():  # the setting for TF32 at the time of the forward has chosen their length
            chunk = saved.numel() // heads
        call = _Call(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, chunk)
        if not saved.numel():  # the forward did not expect to be differentiated
            saved = call.new(heads * chunk)
            call.fill(saved)
        scores, triangle = call.split(saved)
        dy = rows_of(dy)
        sides = call.sides(triangle)
        states, n, _ = call.states(sides)
        dstates, dn, before = _state_gradients(call, sides, dy, dstate, scores)
        delta = triangle is not None
        parts = call.result(call.tiles_e + call.tiles_narrow, call.b, call.t, call.g) if delta else None
        dv, x = dn, None
        if triangle is not None and parts is not None:
            dv, x = call.result(call.b, call.t, call.g, call.e), call.each(call.g, call.e)
            launch(
                kernels.value_gradients,
                (call.spans.units * call.g * call.tiles_e,),
                **strided("v", call.v),
                **call.places(),
                beta=call.beta,
                triangle=triangle,
                dn=dn,
                x=x,
                dv=dv,
                dbeta=parts[call.tiles_narrow :],
                rows=call.b * call.t * call.g,
                V_SHARE=call.v_share,
                BE=call.tile_e,
            )
        dp = _score_gradients(call, dy, n, scale, strict=False)
        da = None if x is None else _score_gradients(call, x, n, -1.0, strict=True)
        readers: list[tuple[Any, ...]] = [
            (call.q, dy, dp, scale, call.q_share, r) for r in range(call.h // call.g)
        ]
        if x is not None and da is not None:
            readers.insert(0, (call.k, x, da, -1.0, call.k_share, None))
        dq, dk, dlog_decay = _row_gradients(call, n, (states, dstates), readers, parts)
        dbeta = None if parts is None else parts.sum(0)
        return grouped(dq, q), grouped(dk, k), grouped(dv, v), dlog_decay, dbeta, before


def _state_gradients(
    call: _Call, sides: dict[str, Any], dy: Tensor, dstate: Tensor | None, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the states after chunks, of N, and of the states before."""
    from lintra.ops.linear_attention import triton_recurrence_gradients as kernels

    added = call.new(call.spans.units, call.g, call.f, call.e)
    partial_dn, dn = call.each(call.g, call.e), call.result(call.b, call.t, call.g, call.e)  # dn may be dv
    launch(
        kernels.chunk_gradients,
        (call.spans.units * call.g * call.tiles_f * call.tiles_e,),
        **strided("q", call.q),
        **strided("dy", dy),
        **call.places(),
        log_decay=call.log_decay,
        scores=scores,
        dn=partial_dn,
        added=added,
        scale=call.scale,
        READERS=call.h // call.g,
        Q_SHARE=call.q_share,
        BF=call.tile_f,
        BE=call.tile_e,
    )
    dstates = torch.empty_like(added)
    before = torch.empty(call.state.shape, dtype=torch.float32, device=dy.device)
    launch(
        kernels.state_gradients,
        (call.n, call.g, -(-call.e // call.column)),
        **{name: x for name, x in sides.items() if not name.startswith("new") and name != "V_SHARE"},
        **call.places(serial=True),
        start=None if dstate is None else dstate.contiguous(),
        partial_dn=partial_dn,
        added=added,
        states=dstates,
        dn=dn,
        final=before,
        BF=call.all_f,
        BE=call.column,
        DELTA=call.beta is not None,
    )
    return dstates, dn, before


def _score_gradients(call: _Call, x: Tensor, n: Tensor, scale: float, *, strict: bool) -> Tensor:
    """Return scale x N^T for rows x [b t heads e]."""
    from lintra.ops.linear_attention import triton_recurrence_gradients as kernels

    heads = x.shape[2]
    found = call.each(heads, call.chunk)
    launch(
        kernels.score_gradients,
        (call.spans.units * heads,),
        **strided("x", x),
        **call.values(n),
        **call.places(),
        dscores=found,
        scale=scale,
        READERS=heads // call.g,
        STRICT=strict,
        BE=call.tile_e,
    )
    return found


def _row_gradients(
    call: _Call,
    n: Tensor,
    states: tuple[Tensor, Tensor],
    readers: list[tuple[Any, ...]],
    dbeta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of q [b t h f], k [b t g f] and log_decay, from the states before chunks and the
    gradients of those after. A part of `dbeta` is written too.

    Each of `readers` holds the rows that read a state, the gradients of what they read, the gradients of
    their scores, the scale of the former gradients, how many heads share a row, and which of the state's
    queries the reader is (None: beta k)."""
    from lintra.ops.linear_attention import triton_recurrence_gradients as kernels

    dq, dk = (call.result(call.b, call.t, heads, call.f) for heads in (call.h, call.g))
    here = following = None
    if call.log_decay is not None:
        parts = () if call.decay == "feature" else (call.tiles_narrow,)
        here, following = (call.result(*parts, *call.log_decay.shape) for _ in range(2))
    grid = (call.spans.units * call.g * call.tiles_narrow,)
    given = call.places() | strided("k", call.k)
    given |= {"log_decay": call.log_decay, "states": states[0], "K_SHARE": call.k_share, "dk": dk}
    given |= {"dhere": here, "dnext": following, "rows": call.b * call.t * call.g}
    given |= {"BF": call.tile_narrow, "BE": call.tile_e}
    launch(kernels.late_gradients, grid, **given, **call.values(n), dstates=states[1])
    for x, dread, dscores, scale, share, reader in readers:
        launch(
            kernels.reader_gradients,
            grid,
            **strided("x", x),
            **strided("given", dread),
            **given,
            **call.levels(),
            beta=call.beta,
            dscores=dscores,
            dx=dq,
            dbeta=dbeta,
            scale=scale,
            READER=reader or 0,
            READERS=1 if reader is None else call.h // call.g,
            X_SHARE=share,
            KEYS=reader is None,
        )
    if here is None or following is None:
        return dq, dk, None
    if call.decay == "head":
        here, following = here.sum(0), following.sum(0)
    here[:, 1:] += following[:, :-1]
    return dq, dk, here


recurrence_triton = operator.register_recurrence(
    "recurrence_triton", "triton", forward, backward, saved_size, ["CUDA", "CPU"]
)

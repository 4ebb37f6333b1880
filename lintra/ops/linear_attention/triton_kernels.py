"""The Triton kernels of linear attention, which `triton` launches.

Time is cut into spans, and a span into chunks of C tokens; every sequence begins with a new span. `sum_spans`
sums what each span adds to the state, for all spans at once. `scan_spans` turns these sums into the state
before each span. `outputs` computes every output from its span and the state before it.
Gradients are the same sums with the roles exchanged, two of them backwards in time from the state's gradient:

    dq_i = past_i S dY_i + sum_{j<=i} w_ij (dY_i . V_j) k_j      S: the state, Y and V with the denominator's
    dk_j = left_j R V_j + sum_{i>=j} w_ij (dY_i . V_j) q_i       column: dY = [dn, dd], V = [v, 1]; R: the
    dv_j = left_j R^T k_j + sum_{i>=j} w_ij (q_i . k_j) dn_i     gradient of the state after the chunk

with dn = dy / denominator, dd = -(dy . y) / denominator, w_ij = exp(elapsed_i - elapsed_j + log_input_j),
past_i = exp(elapsed_i) and left_j = exp(elapsed_C - elapsed_j + log_input_j), elapsed counted in the chunk.
dn and dd themselves are never computed: where they would be multiplied by q_i, q_i / denominator_i is used
instead, and dq_i is divided by the denominator at the end. So dy is multiplied as given, in its 16 bits.

A state is kv [F E] followed by z [F], in float32. F and E are cut into tiles of BF and BE. With one tile of
each (RESIDENT), the state stays in registers across the chunks of a span; otherwise a span is one chunk.
Sums are float32 whatever the inputs; PRECISION says how float32 is multiplied (`product`). Offsets into
tensors are 64 bits wide, positions within a state 32.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's annotations describe what its compiler makes of a kernel, not the source.
import os
import re
from inspect import signature

import triton
import triton.language as tl

from lintra.ops.dispatch import INTERPRETED

VARIABLE = "LINTRA_TRITON_CONFIG"
# Launch parameters, tried once for each kind of call; the choice is kept on disk. Few, as each takes a second
# to compile.
_TRIED = [triton.Config({}, num_warps=4, num_stages=2), triton.Config({}, num_warps=8, num_stages=1)]


def _fixed():
    """Return the launch parameters that LINTRA_TRITON_CONFIG names, None if it is not set."""
    given = os.environ.get(VARIABLE, "")
    if not given:
        return None
    found = re.fullmatch("(1|2|4|8|16|32),([1-9])", given)
    if found is None:
        raise ValueError(f"{VARIABLE} must be warps and stages, such as 8,1; got {given!r}")
    return triton.Config({}, num_warps=int(found[1]), num_stages=int(found[2]))


_FIXED = _fixed()


def tuned(kernel, tried=_TRIED):
    """Have Triton choose one of the launch parameters `tried` for each kind of call; if there are several,
    those of LINTRA_TRITON_CONFIG take their place. Under the interpreter there is nothing to choose.

    Calls share a choice if their tensors have the same dtypes and all their constants are equal: what is
    compiled from other constants may need more shared memory than there is."""
    if INTERPRETED:
        return kernel
    options = {"cache_results": True} if "cache_results" in signature(triton.autotune).parameters else {}
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    chosen = [_FIXED] if _FIXED is not None and len(tried) > 1 else tried
    return triton.autotune(chosen, key=constants, **options)(kernel)


@triton.jit
def locate_program(HEADS, TILES):
    """Return the unit, head and tile of a program. Programs that share tokens are neighbours: each reads a
    part of a row of memory, and together they read whole rows."""
    program = tl.program_id(0).to(tl.int64)
    return program // TILES // HEADS, program // TILES % HEADS, program % TILES


@triton.jit
def locate_sequence(i, cu_seqlens, time):
    """Return the row of the batch that a sequence lies in, its first token there and its length."""
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + i)
        return i * 0, begin, tl.load(cu_seqlens + i + 1) - begin
    return i, i * 0, i * 0 + time


@triton.jit
def locate_span(unit, spans, sequence_of, first_of, SPAN):
    """Return a span's sequence and its first token in it, which for a spare span is beyond the last."""
    if sequence_of is not None:
        i = tl.load(sequence_of + unit)
        return i, (unit - tl.load(first_of + i)) * SPAN
    return unit // spans, unit % spans * SPAN


@triton.jit
def count_chunks(count, start, SPAN, C: tl.constexpr):
    """Return how many chunks a span has."""
    return ((tl.minimum(tl.maximum(count - start, 0), SPAN) + C - 1) // C).to(tl.int32)


@triton.jit
def locate_tokens(mask, batch, begin, count, first, time, C: tl.constexpr):
    """Return the rows of C tokens from `first`, and masks of those in the sequence and of real ones."""
    token = first + tl.arange(0, C)
    inside = token < count
    row = begin + token
    real = inside
    if mask is not None:
        real = inside & (tl.load(mask + batch * time + row, mask=inside, other=0) != 0)
    return row, inside, real


@triton.jit
def load_rows(x, row, step, column, real, WIDTH: tl.constexpr):
    """Load rows in the dtype they have, with 0 for tokens that are not real."""
    inside = real[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + row[:, None] * step + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_state(state, row, column, step, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(state + row[:, None] * step + column[None, :], mask=inside, other=0.0)


@triton.jit
def apply_map(x, column, real, WIDTH: tl.constexpr, MAP: tl.constexpr):
    """Return features in float32: 0 for padding and outside the tensor, whatever the map makes of 0. A NaN
    stays one."""
    x = x.to(tl.float32)
    if MAP == "elu+1" or MAP == "exp":
        x = tl.exp(x) if MAP == "exp" else tl.where(x > 0, x + 1, tl.exp(tl.where(x > 0, 0.0, x)))
        return tl.where(real[:, None] & (column < WIDTH)[None, :], x, 0.0)
    if MAP == "relu":
        return tl.where(x < 0, 0.0, x)
    return x


@triton.jit
def slope(x, MAP: tl.constexpr):
    """The derivative of the feature map."""
    x = x.to(tl.float32)
    if MAP == "elu+1":
        return tl.where(x > 0, 1.0, tl.exp(tl.where(x > 0, 0.0, x)))
    if MAP == "exp":
        return tl.exp(x)
    if MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    return x * 0 + 1.0


@triton.jit
def product(a, b, total, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + a b, with a transposed if LEFT and b transposed if RIGHT.

    PRECISION "split": a float32 is taken as the sum of two bfloat16, which keep 16 of its 24 bits. Products
    of all these halves are summed but those of two lower ones. bfloat16 has no lower half, and two matrices
    of the same 16-bit dtype are multiplied as they are. With any other PRECISION, `tl.dot` multiplies float32
    as that name says.
    """
    if PRECISION != "split":
        x, y = transposed(a.to(tl.float32), LEFT), transposed(b.to(tl.float32), RIGHT)
        return tl.dot(x, y, total, input_precision=PRECISION)
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(transposed(a, LEFT), transposed(b, RIGHT), total)
    x, y = transposed(a.to(tl.bfloat16), LEFT), transposed(b.to(tl.bfloat16), RIGHT)
    if b.dtype != tl.bfloat16:
        total = tl.dot(x, transposed(lower_half(b), RIGHT), total)
    if a.dtype != tl.bfloat16:
        total = tl.dot(transposed(lower_half(a), LEFT), y, total)
    return tl.dot(x, y, total)


@triton.jit
def transposed(x, YES: tl.constexpr):
    return tl.trans(x) if YES else x


@triton.jit
def lower_half(x):
    """Return what float32 loses when it is rounded to bfloat16, in bfloat16."""
    x = x.to(tl.float32)
    return (x - x.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)


@triton.jit
def narrowed(features, kind, EXACT: tl.constexpr):
    """Return features in the 16-bit dtype of the inputs if EXACT, that is, if it holds them exactly."""
    return features.to(kind) if EXACT else features


@triton.jit
def load_logarithms(log_decay, log_input, at, real, C: tl.constexpr):
    """Return, as logarithms: a chunk's decay from its beginning through each token, the weights of its inputs
    and its whole decay.

    Decays are float64: the decay between two tokens is a small difference of sums that may be thousands."""
    elapsed = tl.zeros([C], tl.float64)
    inputs = tl.zeros([C], tl.float32)
    whole = tl.sum(elapsed, 0)
    if log_decay is not None:
        decay = tl.load(log_decay + at, mask=real, other=0.0)
        elapsed = tl.cumsum(decay.to(tl.float64), 0)
        # The last of elapsed, not a sum of its own: a difference from elapsed must use the same number.
        whole = tl.sum(tl.where(tl.arange(0, C) == C - 1, elapsed, 0.0), 0)
    if log_input is not None:
        inputs = tl.load(log_input + at, mask=real, other=0.0)
    return elapsed, inputs, whole


@triton.jit
def exponential(logarithm):
    """Return exp in float32: sums of decays are float64."""
    return tl.exp(logarithm.to(tl.float32))


@triton.jit
def decay_weights(
    scores, elapsed, inputs, WEIGHTED: tl.constexpr, C: tl.constexpr, BY_KEY: tl.constexpr = False
):
    """Return scores [query key] (BY_KEY: [key query]) times w, 0 for the future. The future is masked before
    the exponential, which may be inf there."""
    place = tl.arange(0, C)
    # Two float32 for each sum: C x C differences of float64 are slow on most GPUs.
    elapsed_high = elapsed.to(tl.float32)
    elapsed_low = (elapsed - elapsed_high).to(tl.float32)
    left_low = elapsed_low - inputs
    if BY_KEY:
        seen = place[None, :] >= place[:, None]
        exponent = elapsed_high[None, :] - elapsed_high[:, None]
        exponent += elapsed_low[None, :] - left_low[:, None]
    else:
        seen = place[:, None] >= place[None, :]
        exponent = elapsed_high[:, None] - elapsed_high[None, :]
        exponent += elapsed_low[:, None] - left_low[None, :]
    if WEIGHTED:
        return tl.where(seen, scores * tl.exp(tl.where(seen, exponent, float("-inf"))), 0.0)
    return tl.where(seen, scores, 0.0)


@triton.jit
def advance(kv, z, keys, values, elapsed, inputs, whole, log_decay, log_input, PRECISION: tl.constexpr):
    """Return the state after a chunk."""
    if log_decay is not None:
        kv *= exponential(whole)
        z *= exponential(whole)
    if log_decay is not None or log_input is not None:
        keys = keys.to(tl.float32) * exponential(whole - elapsed + inputs)[:, None]
    return product(keys, values, kv, True, False, PRECISION), z + tl.sum(keys.to(tl.float32), 0)


@triton.jit
def over(x, denominator):
    """Return rows of x divided by their denominators, or 0 where the denominator is 0, as y is there."""
    nothing = denominator == 0
    return x * tl.where(nothing, 0.0, 1.0 / tl.where(nothing, 1.0, denominator))[:, None]


@tuned
@triton.jit
def sum_spans(
    a, a_batch, a_token, a_head, c, c_batch, c_token, c_head,
    log_decay, log_input, denominator, dd, mask, cu_seqlens, sequence_of, first_of,
    states, decays, start_kv, start_z, final_kv, final_z, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, BACKWARD: tl.constexpr, SERIAL: tl.constexpr,
):  # fmt: skip
    """Sum what each span adds to the state, and the logarithm of how much it leaves of the state before it.

    Forwards, a = k and c = v. BACKWARD, a = q and c = dy, of all READERS heads that read the state, from the
    last chunk to the first. SERIAL (spans of one chunk, SPAN the longest sequence): a program goes through
    all spans of a sequence from the state `start`, and stores the state before each and the `final` one, as
    `scan_spans` would.
    Programs: spans (SERIAL: sequences); key-value heads; tiles.
    """
    unit, g, tile = locate_program(G, tl.cdiv(F, BF) * tl.cdiv(E, BE))
    tile_f, tile_e = tile // tl.cdiv(E, BE), tile % tl.cdiv(E, BE)
    column_f, column_e = tile_f * BF + tl.arange(0, BF), tile_e * BE + tl.arange(0, BE)
    SIZE: tl.constexpr = F * E + F
    if SERIAL:
        i, first = unit, unit * 0
        unit = tl.load(first_of + i) if first_of is not None else i * spans
    else:
        i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    inside = (column_f < F)[:, None] & (column_e < E)[None, :]
    place = column_f[:, None] * E + column_e[None, :]
    kv = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if SERIAL and start_kv is not None:
        kv = tl.load(start_kv + (i * G + g) * F * E + place, mask=inside, other=0.0)
    if SERIAL and start_z is not None:
        z = tl.load(start_z + (i * G + g) * F + column_f, mask=column_f < F, other=0.0)
    left = tl.zeros([C], tl.float32)
    remaining = tl.sum(left.to(tl.float64), 0)
    chunks = count_chunks(count, first, SPAN, C)
    for step in range(chunks):
        chunk = chunks - 1 - step if BACKWARD else step
        if SERIAL:
            state = states + ((unit + chunk) * G + g) * SIZE
            tl.store(state + place, kv, mask=inside)
            if tile_e == 0:
                tl.store(state + F * E + column_f, z, mask=column_f < F)
        row, _, real = locate_tokens(mask, batch, begin, count, first + chunk * C, time, C)
        at = (batch * time + row) * G + g
        elapsed, inputs, whole = load_logarithms(log_decay, log_input, at, real, C)
        remaining += whole
        if log_decay is not None:
            kv *= exponential(whole)
            z *= exponential(whole)
        for reader in range(READERS):
            head = g * READERS + reader
            x = load_rows(a + batch * a_batch + head * a_head, row, a_token, column_f, real, F)
            y = load_rows(c + batch * c_batch + head * c_head, row, c_token, column_e, real, E)
            features = apply_map(x, column_f, real, F, MAP)
            if BACKWARD:
                line = (batch * time + row) * (G * READERS) + head
                features = over(features, tl.load(denominator + line, mask=real, other=1.0))
                if log_decay is not None:
                    features *= exponential(elapsed)[:, None]
                kv = product(features, y, kv, True, False, PRECISION)
                z += tl.sum(features * tl.load(dd + line, mask=real, other=0.0)[:, None], 0)
            else:
                if log_decay is not None or log_input is not None:
                    left = exponential(whole - elapsed + inputs)
                    features *= tl.where(real, left, 0.0)[:, None]
                    kv = product(features, y, kv, True, False, PRECISION)
                else:
                    kv = product(narrowed(features, y.dtype, EXACT), y, kv, True, False, PRECISION)
                z += tl.sum(features, 0)
    kv_at = states + (unit * G + g) * SIZE
    z_at = kv_at + F * E
    if SERIAL:
        kv_at = final_kv + (i * G + g) * F * E
        z_at = final_z + (i * G + g) * F
    elif log_decay is not None and tile == 0:
        tl.store(decays + unit * G + g, remaining.to(tl.float32))
    tl.store(kv_at + place, kv, mask=inside)
    if tile_e == 0:
        tl.store(z_at + column_f, z, mask=column_f < F)


@triton.jit
def scan_spans(
    states, decays, start_kv, start_z, final_kv, final_z, first_of, spans, G,
    F: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Replace what each span adds by the state before it (BACKWARD: after it), and store the `final` state.

    Grid: sequences; key-value heads; blocks of a state's entries.
    """
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    SIZE: tl.constexpr = F * E + F
    inside = place < SIZE
    counted = place >= F * E  # z, after kv
    first, count = i * spans, spans
    if first_of is not None:
        first = tl.load(first_of + i)
        count = (tl.load(first_of + i + 1) - first).to(tl.int32)
    state = tl.zeros([BLOCK], tl.float32)
    if start_kv is not None:
        state += tl.load(start_kv + (i * G + g) * F * E + place, mask=place < F * E, other=0.0)
    if start_z is not None:
        state += tl.load(start_z + (i * G + g) * F + place - F * E, mask=counted & inside, other=0.0)
    # What the next span adds is loaded ahead, so that loads do not wait for this span.
    turn = -1 if BACKWARD else 1
    unit = first + (count - 1 if BACKWARD else 0)
    added = tl.load(states + (unit * G + g) * SIZE + place, mask=inside & (count > 0), other=0.0)
    for step in range(count):
        at = states + (unit * G + g) * SIZE + place
        after = states + ((unit + turn) * G + g) * SIZE + place  # G * SIZE alone would be 32 bits wide
        following = tl.load(after, mask=inside & (step + 1 < count), other=0.0)
        tl.store(at, state, mask=inside)
        if decays is not None:
            state *= tl.exp(tl.load(decays + unit * G + g))
        state += added
        added = following
        unit += turn
    tl.store(final_kv + (i * G + g) * F * E + place, state, mask=place < F * E)
    tl.store(final_z + (i * G + g) * F + place - F * E, state, mask=counted & inside)


@triton.jit
def store_rounded(y, lost, place, total, mask):
    """Store numbers in the dtype of y and, where wanted, what they lose by that: 0 if it is not finite."""
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + place, rounded, mask=mask)
    if lost is not None:
        rest = total - rounded.to(tl.float32)
        tl.store(lost + place, tl.where(rest - rest == 0, rest, 0.0), mask=mask)


@tuned
@triton.jit
def outputs(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    log_decay, log_input, mask, cu_seqlens, sequence_of, first_of, states,
    y, lost, denominator, eps, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Compute y and the denominators of a span; if not CAUSAL, from the one state of the sequence.

    Programs: spans of queries; query heads; tiles of E.
    """
    heads = G * READERS
    unit, head, tile_e = locate_program(heads, tl.cdiv(E, BE))
    g = head // READERS
    column_e = tile_e * BE + tl.arange(0, BE)
    i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    states += ((unit if CAUSAL else i) * G + g) * (F * E + F)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + g * k_head
    v += batch * v_batch + g * v_head
    kv = tl.zeros([BF, BE], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if RESIDENT:
        column_f = tl.arange(0, BF)
        kv = load_state(states, column_f, column_e, E, F, E)
        z = tl.load(states + F * E + column_f, mask=column_f < F, other=0.0)
    for chunk in range(count_chunks(count, first, SPAN, C)):
        row, inside, real = locate_tokens(mask, batch, begin, count, first + chunk * C, time, C)
        at = (batch * time + row) * G + g
        elapsed, inputs, whole = load_logarithms(log_decay, log_input, at, real, C)
        scores = tl.zeros([C, C], tl.float32)
        total = tl.zeros([C, BE], tl.float32)
        weight = tl.zeros([C], tl.float32)
        kind = q.dtype.element_ty
        keys = narrowed(tl.zeros([C, BF], tl.float32), kind, EXACT)
        for tile in range(tl.cdiv(F, BF)):
            column_f = tile * BF + tl.arange(0, BF)
            queries = apply_map(load_rows(q, row, q_token, column_f, real, F), column_f, real, F, MAP)
            if CAUSAL:
                keys = apply_map(load_rows(k, row, k_token, column_f, real, F), column_f, real, F, MAP)
                keys = narrowed(keys, kind, EXACT)
                scores = product(narrowed(queries, kind, EXACT), keys, scores, False, True, PRECISION)
            if not RESIDENT:
                kv = load_state(states, column_f, column_e, E, F, E)
                z = tl.load(states + F * E + column_f, mask=column_f < F, other=0.0)
            weight += tl.sum(queries * z[None, :], 1)
            total = product(narrowed(queries, kind, EXACT), kv, total, False, False, PRECISION)
        if log_decay is not None:
            weight *= exponential(elapsed)
            total *= exponential(elapsed)[:, None]
        if CAUSAL:
            values = load_rows(v, row, v_token, column_e, real, E)
            scores = decay_weights(scores, elapsed, inputs, log_decay is not None or log_input is not None, C)
            total = product(scores, values, total, False, False, PRECISION)
            weight += tl.sum(scores, 1)
            if RESIDENT:
                kv, z = advance(kv, z, keys, values, elapsed, inputs, whole, log_decay, log_input, PRECISION)
        if NORMALIZE:
            weight += eps
            total /= tl.where(weight == 0, 1.0, weight)[:, None]
            total = tl.where((weight == 0)[:, None], 0.0, total)
        else:
            weight = weight * 0 + 1.0
        if CAUSAL:  # padding may meet a state that is not finite
            total = tl.where(real[:, None], total, 0.0)
        line = (batch * time + row) * heads + head
        place = line[:, None] * E + column_e[None, :]
        store_rounded(y, lost, place, total, inside[:, None] & (column_e < E)[None, :])
        if tile_e == 0:
            tl.store(denominator + line, weight, mask=inside)


@triton.jit
def step(
    q, q_batch, q_head, k, k_batch, k_head, v, v_batch, v_head, log_decay, log_input, mask, kv, z,
    y, lost, denominator, kv_out, z_out, eps, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr,
    MAP: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Compute the recurrence for one token: features, new state, y and its denominator in one launch.

    The first head that reads a state writes the new one. y is computed before the state is rounded to the
    dtype of kv. Grid: samples; query heads; tiles of E.
    """
    i, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    g = head // READERS
    at = i * G + g
    column_e = tl.program_id(2) * BE + tl.arange(0, BE)
    real = tl.full([1], True, tl.int1)
    if mask is not None:
        real = tl.load(mask + i + tl.arange(0, 1)) != 0
    kept = tl.full([1], 1.0, tl.float32)
    put = tl.full([1], 1.0, tl.float32)
    if log_decay is not None:
        kept = tl.exp(tl.load(log_decay + at + tl.arange(0, 1), mask=real, other=0.0))
    if log_input is not None:
        put = tl.exp(tl.load(log_input + at + tl.arange(0, 1), mask=real, other=0.0))
    value = load_rows(v + i * v_batch + g * v_head, tl.arange(0, 1), 0, column_e, real, E).to(tl.float32)
    value = tl.sum(value, 0)
    total = tl.zeros([BE], tl.float32)
    weight = tl.zeros([1], tl.float32)
    first = head % READERS == 0
    for tile in range(tl.cdiv(F, BF)):
        column_f = tile * BF + tl.arange(0, BF)
        query = load_rows(q + i * q_batch + head * q_head, tl.arange(0, 1), 0, column_f, real, F)
        key = load_rows(k + i * k_batch + g * k_head, tl.arange(0, 1), 0, column_f, real, F)
        query = tl.sum(apply_map(query, column_f, real, F, MAP), 0)
        key = tl.sum(apply_map(key, column_f, real, F, MAP), 0) * put
        wide = (column_f < F)[:, None] & (column_e < E)[None, :]
        place = at * F * E + column_f[:, None] * E + column_e[None, :]
        state = tl.load(kv + place, mask=wide, other=0.0).to(tl.float32) * kept[None, :]
        state += key[:, None] * value[None, :]
        counted = tl.load(z + at * F + column_f, mask=column_f < F, other=0.0) * kept + key
        if first:
            tl.store(kv_out + place, state, mask=wide)
            if tl.program_id(2) == 0:
                tl.store(z_out + at * F + column_f, counted, mask=column_f < F)
        total += tl.sum(state * query[:, None], 0)
        weight += tl.sum(counted * query, 0)
    if NORMALIZE:
        weight += eps
        total = tl.where(weight == 0, 0.0, total / tl.where(weight == 0, 1.0, weight))
    else:
        weight = weight * 0 + 1.0
    total = tl.where(real, total, 0.0)
    line = i * G * READERS + head
    store_rounded(y, lost, line * E + column_e, total, column_e < E)
    if tl.program_id(2) == 0:
        tl.store(denominator + line + tl.arange(0, 1), weight)

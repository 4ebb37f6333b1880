"""The Triton kernels of the gradients of linear attention; `triton_kernels` has the formulas."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's annotations describe what its compiler makes of a kernel, not the source.
import triton
import triton.language as tl

from lintra.ops.linear_attention.triton_kernels import (
    advance,
    apply_map,
    count_chunks,
    decay_weights,
    exponential,
    load_logarithms,
    load_rows,
    load_state,
    locate_program,
    locate_sequence,
    locate_span,
    locate_tokens,
    narrowed,
    over,
    product,
    slope,
    tuned,
)


@triton.jit
def _write(total, raw, out, dots, tile, line, column, inside, real, rows, F: tl.constexpr, MAP: tl.constexpr):
    """Store the gradient of queries or keys `raw`, given that of their features, and features . gradient as
    `dots`."""
    if dots is not None:
        dot = tl.sum(total * apply_map(raw, column, real, F, MAP), 1)
        tl.store(dots + tile * rows + line, dot, mask=inside)
    total = tl.where(real[:, None], total * slope(raw, MAP), 0.0)
    place = line[:, None] * F + column[None, :]
    tl.store(out + place, total, mask=inside[:, None] & (column < F)[None, :])


@triton.jit
def denominator_gradients(
    dy, dy_batch, dy_token, dy_head, y, lost, mask, dd, rows, time, H,
    E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Compute dd times the denominator for C rows, 0 for padding; y is y + `lost` if that is given. Grid:
    blocks of rows."""
    line = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    head, token, batch = line % H, line // H % time, line // H // time
    inside = line < rows
    real = inside
    if mask is not None:
        real = inside & (tl.load(mask + batch * time + token, mask=inside, other=0) != 0)
    total = tl.zeros([C], tl.float32)
    if NORMALIZE:
        at = dy + batch * dy_batch + token * dy_token + head * dy_head
        for tile in range(tl.cdiv(E, BE)):
            column = tile * BE + tl.arange(0, BE)
            there = real[:, None] & (column < E)[None, :]
            given = tl.load(at[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
            place = line[:, None] * E + column[None, :]
            made = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
            if lost is not None:
                made += tl.load(lost + place, mask=there, other=0.0).to(tl.float32)
            total -= tl.sum(given * made, 1)
    tl.store(dd + line, total, mask=inside)


@tuned
@triton.jit
def query_gradients(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    dy, dy_batch, dy_token, dy_head,
    log_decay, log_input, denominator, dd, mask, cu_seqlens, sequence_of, first_of, states,
    dq, dots, rows, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Compute dq of a span from the state before it, and q . dq [tiles, rows] if `dots` are wanted.

    Programs: spans of queries; query heads; tiles of F.
    """
    heads = G * READERS
    unit, head, tile_f = locate_program(heads, tl.cdiv(F, BF))
    g = head // READERS
    column_f = tile_f * BF + tl.arange(0, BF)
    i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    states += ((unit if CAUSAL else i) * G + g) * (F * E + F)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + g * k_head
    v += batch * v_batch + g * v_head
    dy += batch * dy_batch + head * dy_head
    z = tl.load(states + F * E + column_f, mask=column_f < F, other=0.0)
    kv = tl.zeros([BF, BE], tl.float32)
    if RESIDENT:
        kv = load_state(states, column_f, tl.arange(0, BE), E, F, E)
    for chunk in range(count_chunks(count, first, SPAN, C)):
        row, inside, real = locate_tokens(mask, batch, begin, count, first + chunk * C, time, C)
        at = (batch * time + row) * G + g
        elapsed, inputs, whole = load_logarithms(log_decay, log_input, at, real, C)
        line = (batch * time + row) * heads + head
        weight = tl.load(denominator + line, mask=real, other=1.0)
        column_gradient = tl.load(dd + line, mask=real, other=0.0)
        values = tl.zeros([C, BE], v.dtype.element_ty)
        scores = tl.zeros([C, C], tl.float32) + column_gradient[:, None]
        total = column_gradient[:, None] * z[None, :]
        for tile in range(tl.cdiv(E, BE)):
            column_e = tile * BE + tl.arange(0, BE)
            given = load_rows(dy, row, dy_token, column_e, real, E)
            if CAUSAL:
                values = load_rows(v, row, v_token, column_e, real, E)
                scores = product(given, values, scores, False, True, PRECISION)
            if not RESIDENT:
                kv = load_state(states, column_f, column_e, E, F, E)
            total = product(given, kv, total, False, True, PRECISION)
        if log_decay is not None:
            total *= exponential(elapsed)[:, None]
        if CAUSAL:
            keys = apply_map(load_rows(k, row, k_token, column_f, real, F), column_f, real, F, MAP)
            keys = narrowed(keys, k.dtype.element_ty, EXACT)
            scores = decay_weights(scores, elapsed, inputs, log_decay is not None or log_input is not None, C)
            total = product(scores, keys, total, False, False, PRECISION)
            if RESIDENT:
                kv, z = advance(kv, z, keys, values, elapsed, inputs, whole, log_decay, log_input, PRECISION)
        total = over(total, weight)
        raw = load_rows(q, row, q_token, column_f, real, F)
        _write(total, raw, dq, dots, tile_f, line, column_f, inside, real, rows, F, MAP)


@tuned
@triton.jit
def key_gradients(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, v, v_batch, v_token, v_head,
    dy, dy_batch, dy_token, dy_head,
    log_decay, log_input, denominator, dd, mask, cu_seqlens, sequence_of, first_of, states,
    dk, dots, rows, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Compute dk of a span, backwards in time from the state's gradient after it, and k . dk [tiles, rows].

    Programs: spans of keys; key-value heads; tiles of F.
    """
    unit, g, tile_f = locate_program(G, tl.cdiv(F, BF))
    column_f = tile_f * BF + tl.arange(0, BF)
    i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    states += ((unit if CAUSAL else i) * G + g) * (F * E + F)
    k += batch * k_batch + g * k_head
    v += batch * v_batch + g * v_head
    dz = tl.load(states + F * E + column_f, mask=column_f < F, other=0.0)
    dkv = tl.zeros([BF, BE], tl.float32)
    if RESIDENT:
        dkv = load_state(states, column_f, tl.arange(0, BE), E, F, E)
    chunks = count_chunks(count, first, SPAN, C)
    for step in range(chunks):
        chunk = chunks - 1 - step
        row, inside, real = locate_tokens(mask, batch, begin, count, first + chunk * C, time, C)
        at = (batch * time + row) * G + g
        elapsed, inputs, whole = load_logarithms(log_decay, log_input, at, real, C)
        total = tl.zeros([C, BF], tl.float32)
        for tile in range(tl.cdiv(E, BE)):
            column_e = tile * BE + tl.arange(0, BE)
            values = load_rows(v, row, v_token, column_e, real, E)
            if not RESIDENT:
                dkv = load_state(states, column_f, column_e, E, F, E)
            total = product(values, dkv, total, False, True, PRECISION)
        total += dz[None, :]
        if log_decay is not None or log_input is not None:
            total *= exponential(whole - elapsed + inputs)[:, None]
        if CAUSAL:
            if RESIDENT and log_decay is not None:
                dkv *= exponential(whole)
                dz *= exponential(whole)
            for reader in range(READERS):
                head = g * READERS + reader
                line = (batch * time + row) * (G * READERS) + head
                weight = tl.load(denominator + line, mask=real, other=1.0)
                column_gradient = tl.load(dd + line, mask=real, other=0.0)
                scores = tl.zeros([C, C], tl.float32) + column_gradient[None, :]
                given = tl.zeros([C, BE], dy.dtype.element_ty)
                for tile in range(tl.cdiv(E, BE)):
                    column_e = tile * BE + tl.arange(0, BE)
                    given = load_rows(
                        dy + batch * dy_batch + head * dy_head, row, dy_token, column_e, real, E
                    )
                    values = load_rows(v, row, v_token, column_e, real, E)
                    scores = product(values, given, scores, False, True, PRECISION)
                scores = decay_weights(
                    scores, elapsed, inputs, log_decay is not None or log_input is not None, C, True
                )
                queries = load_rows(q + batch * q_batch + head * q_head, row, q_token, column_f, real, F)
                queries = over(apply_map(queries, column_f, real, F, MAP), weight)
                total = product(scores, queries, total, False, False, PRECISION)
                if RESIDENT:
                    if log_decay is not None:
                        queries *= exponential(elapsed)[:, None]
                    dkv = product(queries, given, dkv, True, False, PRECISION)
                    dz += tl.sum(queries * column_gradient[:, None], 0)
        raw = load_rows(k, row, k_token, column_f, real, F)
        _write(total, raw, dk, dots, tile_f, at, column_f, inside, real, rows, F, MAP)


@tuned
@triton.jit
def value_gradients(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, dy, dy_batch, dy_token, dy_head,
    log_decay, log_input, denominator, mask, cu_seqlens, sequence_of, first_of, states,
    dv, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, RESIDENT: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Compute dv of a span, backwards in time from the state's gradient after it.

    Programs: spans of keys; key-value heads; tiles of E.
    """
    unit, g, tile_e = locate_program(G, tl.cdiv(E, BE))
    column_e = tile_e * BE + tl.arange(0, BE)
    i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    states += ((unit if CAUSAL else i) * G + g) * (F * E + F)
    k += batch * k_batch + g * k_head
    dkv = tl.zeros([BF, BE], tl.float32)
    if RESIDENT:
        dkv = load_state(states, tl.arange(0, BF), column_e, E, F, E)
    chunks = count_chunks(count, first, SPAN, C)
    for step in range(chunks):
        chunk = chunks - 1 - step
        row, inside, real = locate_tokens(mask, batch, begin, count, first + chunk * C, time, C)
        at = (batch * time + row) * G + g
        elapsed, inputs, whole = load_logarithms(log_decay, log_input, at, real, C)
        total = tl.zeros([C, BE], tl.float32)
        for tile in range(tl.cdiv(F, BF)):
            column_f = tile * BF + tl.arange(0, BF)
            keys = apply_map(load_rows(k, row, k_token, column_f, real, F), column_f, real, F, MAP)
            if not RESIDENT:
                dkv = load_state(states, column_f, column_e, E, F, E)
            total = product(narrowed(keys, k.dtype.element_ty, EXACT), dkv, total, False, False, PRECISION)
        if log_decay is not None or log_input is not None:
            total *= exponential(whole - elapsed + inputs)[:, None]
        if CAUSAL:
            if RESIDENT and log_decay is not None:
                dkv *= exponential(whole)
            for reader in range(READERS):
                head = g * READERS + reader
                line = (batch * time + row) * (G * READERS) + head
                weight = tl.load(denominator + line, mask=real, other=1.0)
                scores = tl.zeros([C, C], tl.float32)
                queries = tl.zeros([C, BF], tl.float32)
                for tile in range(tl.cdiv(F, BF)):
                    column_f = tile * BF + tl.arange(0, BF)
                    keys = apply_map(load_rows(k, row, k_token, column_f, real, F), column_f, real, F, MAP)
                    keys = narrowed(keys, k.dtype.element_ty, EXACT)
                    queries = load_rows(q + batch * q_batch + head * q_head, row, q_token, column_f, real, F)
                    queries = over(apply_map(queries, column_f, real, F, MAP), weight)
                    scores = product(keys, queries, scores, False, True, PRECISION)
                scores = decay_weights(
                    scores, elapsed, inputs, log_decay is not None or log_input is not None, C, True
                )
                given = load_rows(dy + batch * dy_batch + head * dy_head, row, dy_token, column_e, real, E)
                total = product(scores, given, total, False, False, PRECISION)
                if RESIDENT:
                    if log_decay is not None:
                        queries *= exponential(elapsed)[:, None]
                    dkv = product(queries, given, dkv, True, False, PRECISION)
        place = at[:, None] * E + column_e[None, :]
        total = tl.where(real[:, None], total, 0.0)
        tl.store(dv + place, total, mask=inside[:, None] & (column_e < E)[None, :])


@triton.jit
def logarithm_gradients(
    query_dots, key_dots, mask, cu_seqlens, sequence_of, first_of, past, final_kv, final_z, future,
    dlog_decay, dlog_input, rows, spans, time, SPAN, G, READERS,
    F: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute d log_input = k . dk, and d log_decay: the sum of q . dq - k . dk from each token to the end of
    its span, plus the state after the span times its gradient.

    A token's gradient is a small difference of long sums. They are summed in float64, and only to the end of
    the span, as their terms are float32.

    Programs: spans of keys; key-value heads.
    """
    unit, g, _ = locate_program(G, 1)
    i, first = locate_span(unit, spans, sequence_of, first_of, SPAN)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    chunks = count_chunks(count, first, SPAN, C)
    behind = tl.sum(tl.zeros([C], tl.float64), 0)
    if dlog_decay is not None:
        SIZE: tl.constexpr = F * E + F
        more, last = first + SPAN < count, first + SPAN >= count
        for block in range(tl.cdiv(SIZE, BLOCK)):
            place = block * BLOCK + tl.arange(0, BLOCK)
            inside, counted = place < SIZE, (place >= F * E) & (place < SIZE)  # z, after kv
            gradient = tl.load(future + (unit * G + g) * SIZE + place, mask=inside, other=0.0).to(tl.float64)
            state = tl.load(past + ((unit + 1) * G + g) * SIZE + place, mask=inside & more, other=0.0)
            state += tl.load(final_kv + (i * G + g) * F * E + place, mask=last & (place < F * E), other=0.0)
            at_z = final_z + (i * G + g) * F + place - F * E
            state += tl.load(at_z, mask=last & counted, other=0.0)
            behind += tl.sum(state * gradient, 0)
    for step in range(chunks):
        row, inside, real = locate_tokens(mask, batch, begin, count, first + (chunks - 1 - step) * C, time, C)
        at = (batch * time + row) * G + g
        key = tl.zeros([C], tl.float64)
        query = tl.zeros([C], tl.float64)
        for tile in range(TILES):
            key += tl.load(key_dots + tile * rows * G + at, mask=real, other=0.0).to(tl.float64)
            if dlog_decay is not None:
                for reader in range(READERS):
                    line = (tile * rows + batch * time + row) * (G * READERS) + g * READERS + reader
                    query += tl.load(query_dots + line, mask=real, other=0.0).to(tl.float64)
        if dlog_input is not None:
            tl.store(dlog_input + at, key.to(tl.float32), mask=inside)
        if dlog_decay is not None:
            gradient = tl.cumsum(query - key, 0, reverse=True) + behind
            tl.store(dlog_decay + at, tl.where(real, gradient, 0.0).to(tl.float32), mask=inside)
            behind += tl.sum(query - key, 0)

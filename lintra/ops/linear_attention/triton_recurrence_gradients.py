"""The Triton kernels of the gradients of the recurrences; `triton_recurrence_kernels` has the letters.

Backwards from dY (times the scale) and the gradient dS' of the state after a chunk; X is the gradient of
beta V:

    dN = P^T dY + (H K) dS'       `chunk_gradients`, which leaves out the term of dS'
    dS = G_C dS' + (G Q)^T dY - W^T dN                       `state_gradients`, in reverse order
    X  = T^T dN                   `value_gradients`; without the delta rule there is no X, and dV = dN
    dP = dY N^T, dA' = -X N^T     `score_gradients`: A' is A of keys that are multiplied by beta
    dQ, dK and those of decays    `late_gradients` from H K, then `reader_gradients` from A' and G beta K, and
                                  once for each query of a state from P and G Q

beta k reads the chunk as q does, except its own token. The gradient of a token's decay sums the terms of all
pairs of tokens that it lies between, at each level through what is left at the border, so that no terms have
to cancel each other. A key fades by the decays of the tokens after it; the gradient of such a decay is
gathered at the token before it, as `dnext`.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's annotations describe what its compiler makes of a kernel, not the source.
import triton
import triton.language as tl

from lintra.ops.linear_attention.triton_kernels import (
    load_rows,
    load_state,
    locate_program,
    locate_sequence,
    locate_span,
    locate_tokens,
)
from lintra.ops.linear_attention.triton_recurrence_kernels import (
    across,
    between,
    fade_since,
    is_last,
    is_late,
    load_decay,
    sum_in_runs,
    to_border,
    tuned,
    tuned_accumulating,
    tuned_serial,
    until_last,
)


@tuned
@triton.jit
def chunk_gradients(
    q, q_batch, q_token, q_head, dy, dy_batch, dy_token, dy_head, log_decay, mask, cu_seqlens, sequence_of,
    first_of, scores, dn, added, scale, spans, time, G, READERS, Q_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P^T dY as `dn` [b t g E] and (G Q)^T dY as `added` [chunks g F E], over all READERS of a state.

    Programs: chunks; states; pairs of a tile of F and, running faster, one of E.
    """
    unit, g, tile = locate_program(G, tl.cdiv(F, BF) * tl.cdiv(E, BE))
    tile_f, tile_e = tile // tl.cdiv(E, BE), tile % tl.cdiv(E, BE)
    column_f, column_e = tile_f * BF + tl.arange(0, BF), tile_e * BE + tl.arange(0, BE)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    at = (batch * time + row) * G + g
    total = tl.zeros([C, BE], tl.float32)
    state = tl.zeros([BF, BE], tl.float32)
    for reader in range(READERS):
        head = g * READERS + reader
        given = load_rows(dy + batch * dy_batch + head * dy_head, row, dy_token, column_e, real, E)
        given = given.to(tl.float32) * scale
        queries = load_rows(
            q + batch * q_batch + head // Q_SHARE * q_head, row, q_token, column_f, real, F
        ).to(tl.float32)  # fmt: skip
        queries = fade_since(queries, log_decay, at, real, G, column_f, F, C, DECAY)
        state += tl.dot(tl.trans(queries), given, input_precision=PRECISION)
        if tile_f == 0:
            line = (batch * time + row) * (G * READERS) + head
            weights = load_rows(scores, line, C, tl.arange(0, C), real, C)
            total += tl.dot(tl.trans(weights), given, input_precision=PRECISION)
    place = column_f[:, None] * E + column_e[None, :]
    inside_state = (column_f < F)[:, None] & (column_e < E)[None, :]
    tl.store(added + (unit * G + g) * F * E + place, state, mask=inside_state)
    if tile_f == 0:
        wide = inside[:, None] & (column_e < E)[None, :]
        tl.store(dn + at[:, None] * E + column_e[None, :], total, mask=wide)


@tuned_serial
@triton.jit
def state_gradients(
    late, late_batch, late_token, late_head, erasing, whole, mask, cu_seqlens, first_of, start, partial_dn,
    added, states, dn, final, spans, time, G, K_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute, from the gradient `start` of the last state, that of the state after each chunk of a sequence
    as `states` [chunks g F E], that of the state before the first as `final`, and dN as `dn`.

    Grid: sequences; states; tiles of E. BF holds all features.
    """
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column_f, column_e = tl.arange(0, BF), tl.program_id(2) * BE + tl.arange(0, BE)
    unit = tl.load(first_of + i) if first_of is not None else i * spans
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    late += batch * late_batch + g // K_SHARE * late_head
    inside_state = (column_f < F)[:, None] & (column_e < E)[None, :]
    place = column_f[:, None] * E + column_e[None, :]
    state = tl.zeros([BF, BE], tl.float32)
    if start is not None:
        state += load_state(start + (i * G + g) * F * E, column_f, column_e, E, F, E)
    chunks = tl.cdiv(count, C).to(tl.int32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        at_unit = (unit + chunk) * G + g
        tl.store(states + at_unit * F * E + place, state, mask=inside_state)
        row, inside, real = locate_tokens(mask, batch, begin, count, chunk * C, time, C)
        at = (batch * time + row) * G + g
        keys = load_rows(late, row, late_token, column_f, real, F).to(tl.float32)
        total = load_rows(partial_dn, at, E, column_e, real, E)
        total += tl.dot(keys, state, input_precision=PRECISION)
        total = tl.where(real[:, None], total, 0.0)  # also where the state's gradient is not finite
        wide = inside[:, None] & (column_e < E)[None, :]
        tl.store(dn + at[:, None] * E + column_e[None, :], total, mask=wide)
        if DECAY != "none":
            state *= tl.load(whole + at_unit * F + column_f, mask=column_f < F, other=0.0)[:, None]
        state += load_state(added + at_unit * F * E, column_f, column_e, E, F, E)
        if DELTA:
            erased = load_rows(erasing, at, F, column_f, real, F)
            state -= tl.dot(tl.trans(erased), total, input_precision=PRECISION)
    tl.store(final + (i * G + g) * F * E + place, state, mask=inside_state)


@tuned
@triton.jit
def value_gradients(
    v, v_batch, v_token, v_head, beta, mask, cu_seqlens, sequence_of, first_of, triangle, dn, x, dv, dbeta,
    rows, spans, time, G, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute X and dV of the delta rule [b t g E], and X . V as part of `dbeta` [tiles b t g].

    Programs: chunks; states; tiles of E.
    """
    unit, g, tile = locate_program(G, tl.cdiv(E, BE))
    column = tile * BE + tl.arange(0, BE)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    at = (batch * time + row) * G + g
    inverse = load_rows(triangle, at, C, tl.arange(0, C), inside, C)
    given = load_rows(dn, at, E, column, real, E)
    solved = tl.dot(tl.trans(inverse), given, input_precision=PRECISION)
    values = load_rows(v + batch * v_batch + g // V_SHARE * v_head, row, v_token, column, real, E)
    rate = tl.load(beta + at, mask=real, other=0.0)
    wide = inside[:, None] & (column < E)[None, :]
    place = at[:, None] * E + column[None, :]
    tl.store(x + place, solved, mask=wide)
    tl.store(dv + place, tl.where(real[:, None], solved * rate[:, None], 0.0), mask=wide)
    part = tl.where(real, tl.sum(solved * values.to(tl.float32), 1), 0.0)
    tl.store(dbeta + tile * rows + at, part, mask=inside)


@tuned
@triton.jit
def score_gradients(
    x, x_batch, x_token, x_head, n, n_batch, n_token, n_head, mask, cu_seqlens, sequence_of, first_of,
    dscores, scale, spans, time, G, READERS, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STRICT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute scale x N^T [b t h C] for rows x that read earlier tokens and, unless STRICT, their own.

    Programs: chunks; heads of x.
    """
    unit, head, _ = locate_program(G * READERS, 1)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    x += batch * x_batch + head * x_head
    n += batch * n_batch + head // READERS // V_SHARE * n_head
    total = tl.zeros([C, C], tl.float32)
    for tile in range(tl.cdiv(E, BE)):
        column = tile * BE + tl.arange(0, BE)
        readers = load_rows(x, row, x_token, column, real, E).to(tl.float32)
        values = load_rows(n, row, n_token, column, real, E).to(tl.float32)
        total += tl.dot(readers, tl.trans(values), input_precision=PRECISION)
    place = tl.arange(0, C)
    seen = place[:, None] > place[None, :] if STRICT else place[:, None] >= place[None, :]
    line = (batch * time + row) * (G * READERS) + head
    target = line[:, None] * C + place[None, :]
    tl.store(dscores + target, tl.where(seen, total * scale, 0.0), mask=inside[:, None])


@triton.jit
def through_levels(x, keys, dscores, here, following, C: tl.constexpr, BF: tl.constexpr,
                   LEVELS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the gradients [C BF] of rows x, of the keys that they read, and of the decays `here` and
    `following`."""
    place = tl.arange(0, C)
    itself = tl.sum(tl.where(place[:, None] == place[None, :], dscores, 0.0), 1)[:, None]
    dx, dkeys = itself * keys, itself * x
    dhere = tl.zeros([C, BF], tl.float32)
    dnext = tl.zeros([C, BF], tl.float32)
    for level in tl.static_range(LEVELS):
        left, late = to_border(here, following, level, C, BF), is_late(level, C)[:, None]
        weights = across(dscores, level, C)
        read = tl.where(late, 0.0, keys * left)
        reading = tl.where(late, x * left, 0.0)
        to_reader = left * tl.dot(weights, read, input_precision=PRECISION)
        to_key = left * tl.dot(tl.trans(weights), reading, input_precision=PRECISION)
        dx += to_reader
        dkeys += to_key
        dhere += sum_in_runs(x * to_reader, 2**level, True, C, BF)
        fading = sum_in_runs(keys * to_key, 2**level, False, C, BF)
        dnext += tl.where(is_last(level, C)[:, None], 0.0, fading)
    return dx, dkeys, dhere, dnext


@triton.jit
def add_to(target, x, mask, ADD: tl.constexpr):
    """Store x, or ADD it to what is there."""
    if ADD:
        x += tl.load(target, mask=mask, other=0.0)
    tl.store(target, x, mask=mask)


@triton.jit
def store_decay_gradients(
    dhere, dnext, here, following, at, inside, real, real_next, column, tile, rows,
    F: tl.constexpr, DECAY: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the gradients of tokens' decays and of the decays of the tokens after them: [C BF], or a head's
    part [C]."""
    if DECAY == "feature":
        wide = inside[:, None] & (column < F)[None, :]
        target = at[:, None] * F + column[None, :]
        real, real_next = real[:, None], real_next[:, None]
    else:
        wide = inside
        target = tile * rows + at
    add_to(dhere + target, tl.where(real, here, 0.0), wide, ADD)
    add_to(dnext + target, tl.where(real_next, following, 0.0), wide, ADD)


@tuned
@triton.jit
def late_gradients(
    k, k_batch, k_token, k_head, n, n_batch, n_token, n_head, log_decay, mask, cu_seqlens, sequence_of,
    first_of, states, dstates, dk, dhere, dnext, rows, spans, time, G, K_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the terms that come from G_C S and H K, which make the next state: those of dK [b t g F] and of
    the decays, [b t g F] for features or, for heads, a part from each tile [tiles b t g].

    Programs: chunks; states; tiles of F.
    """
    unit, g, tile_f = locate_program(G, tl.cdiv(F, BF))
    column = tile_f * BF + tl.arange(0, BF)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    at = (batch * time + row) * G + g
    n += batch * n_batch + g // V_SHARE * n_head
    total = tl.zeros([C, BF], tl.float32)
    kept = tl.zeros([BF], tl.float32)
    for tile in range(tl.cdiv(E, BE)):
        column_e = tile * BE + tl.arange(0, BE)
        dstate = load_state(dstates + (unit * G + g) * F * E, column, column_e, E, F, E)
        values = load_rows(n, row, n_token, column_e, real, E).to(tl.float32)
        total += tl.dot(values, tl.trans(dstate), input_precision=PRECISION)
        if DECAY != "none":
            state = load_state(states + (unit * G + g) * F * E, column, column_e, E, F, E)
            kept += tl.sum(state * dstate, 1)
    if DECAY != "none":
        _, _, real_next = locate_tokens(mask, batch, begin, count, first + 1, time, C)
        here = load_decay(log_decay, at, real, G, column, 0, F, C, DECAY)
        following = load_decay(log_decay, at, real_next, G, column, 1, F, C, DECAY)
        until = tl.exp(tl.cumsum(until_last(following, C, DECAY), 0, reverse=True))
        kept *= tl.exp(tl.sum(here, 0))
        keys = load_rows(k + batch * k_batch + g // K_SHARE * k_head, row, k_token, column, real, F)
        if DECAY == "head":
            total *= until[:, None]
            after = tl.sum(keys.to(tl.float32) * total, 1)
            of_all = tl.zeros([C], tl.float32) + tl.sum(kept, 0)
        else:
            total *= until
            after = keys.to(tl.float32) * total
            of_all = tl.zeros([C, BF], tl.float32) + kept[None, :]
        after = until_last(tl.cumsum(after, 0), C, DECAY)
        store_decay_gradients(
            dhere, dnext, of_all, after, at, inside, real, real_next, column, tile_f, rows, F, DECAY, False
        )
    wide = inside[:, None] & (column < F)[None, :]
    tl.store(dk + at[:, None] * F + column[None, :], tl.where(real[:, None], total, 0.0), mask=wide)


@tuned_accumulating
@triton.jit
def reader_gradients(
    x, x_batch, x_token, x_head, k, k_batch, k_token, k_head, given, given_batch, given_token, given_head,
    log_decay, beta, mask, cu_seqlens, sequence_of, first_of, states, dscores, dx, dk, dbeta, dhere, dnext,
    scale, rows, spans, time, G, READER, READERS, X_SHARE, K_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of one of each state's READERS to dK and to the gradients of decays, in which
    `late_gradients` has stored the first terms.

    Its rows x read the keys of the chunk, with the gradient `dscores` [b t heads C], and the state before the
    chunk, with the gradient `given` [b t heads E] times scale. The gradient of x is stored as `dx`
    [b t heads F]. With KEYS, x is beta k: its gradient is added to dK instead, and each tile's part of dbeta
    is stored [tiles b t g]. Programs: chunks; states; tiles of F.
    """
    unit, g, tile_f = locate_program(G, tl.cdiv(F, BF))
    column = tile_f * BF + tl.arange(0, BF)
    head = g * READERS + READER
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    _, _, real_next = locate_tokens(mask, batch, begin, count, first + 1, time, C)
    at = (batch * time + row) * G + g
    line = (batch * time + row) * (G * READERS) + head
    place = tl.arange(0, C)
    given += batch * given_batch + head * given_head
    through = tl.zeros([C, BF], tl.float32)
    for tile in range(tl.cdiv(E, BE)):
        column_e = tile * BE + tl.arange(0, BE)
        dy = load_rows(given, row, given_token, column_e, real, E).to(tl.float32)
        state = load_state(states + (unit * G + g) * F * E, column, column_e, E, F, E)
        through += tl.dot(dy * scale, tl.trans(state), input_precision=PRECISION)
    keys = load_rows(k + batch * k_batch + g // K_SHARE * k_head, row, k_token, column, real, F)
    keys = keys.to(tl.float32)
    readers = load_rows(x + batch * x_batch + head // X_SHARE * x_head, row, x_token, column, real, F)
    readers = readers.to(tl.float32)
    rate = tl.zeros([C, 1], tl.float32)
    if KEYS:
        rate = tl.load(beta + at, mask=real, other=0.0)[:, None]
        readers *= rate
    weights = load_rows(dscores, line, C, place, real, C)
    if DECAY == "feature":
        here = load_decay(log_decay, at, real, G, column, 0, F, C, DECAY)
        following = load_decay(log_decay, at, real_next, G, column, 1, F, C, DECAY)
        through *= tl.exp(tl.cumsum(here, 0))
        dread, dkeys, of_here, of_next = through_levels(
            readers, keys, weights, here, following, C, BF, LEVELS, PRECISION
        )
        of_here += tl.cumsum(readers * through, 0, reverse=True)
    else:
        if DECAY == "head":
            here = load_decay(log_decay, at, real, G, place, 0, F, C, DECAY)
            through *= tl.exp(tl.cumsum(here, 0))[:, None]
            weights *= between(here, C)
        dread = tl.dot(weights, keys, input_precision=PRECISION)
        dkeys = tl.dot(tl.trans(weights), readers, input_precision=PRECISION)
        if DECAY == "head":
            pairs = weights * tl.dot(readers, tl.trans(keys), input_precision=PRECISION)
            later = place[:, None] > place[None, :]
            of_here = tl.sum(tl.where(later, tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
            of_here += tl.cumsum(tl.sum(readers * through, 1), 0, reverse=True)
            of_next = of_here * 0
    dread += through
    if DECAY != "none":
        store_decay_gradients(
            dhere, dnext, of_here, of_next, at, inside, real, real_next, column, tile_f, rows, F, DECAY, True
        )
    wide = inside[:, None] & (column < F)[None, :]
    if KEYS:
        part = tile_f * rows + at
        tl.store(dbeta + part, tl.where(real, tl.sum(keys * dread, 1), 0.0), mask=inside)
        dkeys += rate * dread
    else:
        tl.store(dx + line[:, None] * F + column[None, :], tl.where(real[:, None], dread, 0.0), mask=wide)
    target = dk + at[:, None] * F + column[None, :]
    add_to(target, tl.where(real[:, None], dkeys, 0.0), wide, True)

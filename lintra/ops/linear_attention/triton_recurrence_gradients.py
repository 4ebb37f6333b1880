"""The Triton kernels of the gradients of the recurrences; `triton_recurrence_kernels` has the letters.

Backwards, from dY (times the scale) and the gradient dS' of the state after a chunk, with X that of beta V:

    dN = P^T dY + (H K) dS'       `chunk_gradients` but for the term of dS'
    dS = G_C dS' + (G Q)^T dY - W^T dN                       `state_gradients`, in reverse order
    X  = T^T dN                   `value_gradients`; the sum has none and dV = dN
    dP = dY N^T, dA' = -X N^T     `score_gradients`: A' is A of keys that are multiplied by beta
    dQ, dK and those of decays    `feature_gradients`, from P, A', G Q, G beta K and H K

beta k reads the chunk as q does, but not its own token. The gradient of the decay of a token sums the terms
of all pairs that it lies between, at each level by way of what is left to the border: none has to cancel
another. A key fades by the decays of the tokens behind it: their gradients are gathered at the token before
each, as `dnext`.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton annotates what its compiler makes of a kernel, not what is written.
import triton
import triton.language as tl

from lintra.ops.linear_attention.triton_kernels import (
    load_rows,
    load_state,
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
    tuned_recurrence,
    until_last,
)


@tuned_recurrence
@triton.jit
def chunk_gradients(
    q, q_batch, q_token, q_head, dy, dy_batch, dy_token, dy_head, log_decay, mask, cu_seqlens, sequence_of,
    first_of, scores, dn, added, scale, spans, time, G, READERS, Q_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P^T dY as `dn` [b t g E], and (G Q)^T dY as `added` [chunks g F E], of all READERS of a state.

    Grid: chunks; states; tiles of E, the last of the pair of tiles.
    """
    unit, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile_f, tile_e = tl.program_id(2) // tl.cdiv(E, BE), tl.program_id(2) % tl.cdiv(E, BE)
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
    wide = (column_f < F)[:, None] & (column_e < E)[None, :]
    tl.store(added + (unit * G + g) * F * E + place, state, mask=wide)
    if tile_f == 0:
        wide = inside[:, None] & (column_e < E)[None, :]
        tl.store(dn + at[:, None] * E + column_e[None, :], total, mask=wide)


@tuned_recurrence
@triton.jit
def state_gradients(
    late, late_batch, late_token, late_head, erasing, whole, mask, cu_seqlens, first_of, start, partial_dn,
    added, states, dn, final, spans, time, G, K_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk of a sequence as `states` [chunks g F E], of that before the
    first as `final`, and dN as `dn`, from the gradient `start` of the last state.

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
        wide = inside[:, None] & (column_e < E)[None, :]
        tl.store(dn + at[:, None] * E + column_e[None, :], total, mask=wide)
        if DECAY != "none":
            state *= tl.load(whole + at_unit * F + column_f, mask=column_f < F, other=0.0)[:, None]
        state += load_state(added + at_unit * F * E, column_f, column_e, E, F, E)
        if DELTA:
            erased = load_rows(erasing, at, F, column_f, real, F)
            state -= tl.dot(tl.trans(erased), total, input_precision=PRECISION)
    tl.store(final + (i * G + g) * F * E + place, state, mask=inside_state)


@tuned_recurrence
@triton.jit
def value_gradients(
    v, v_batch, v_token, v_head, beta, mask, cu_seqlens, sequence_of, first_of, triangle, dn, x, dv, dbeta,
    rows, spans, time, G, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X and dV of the delta rule [b t g E], and X . V as part of `dbeta` [tiles b t g].

    Grid: chunks; states; tiles of E.
    """
    unit, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BE + tl.arange(0, BE)
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
    tl.store(dv + place, solved * rate[:, None], mask=wide)
    part = tl.where(real, tl.sum(solved * values.to(tl.float32), 1), 0.0)
    tl.store(dbeta + tl.program_id(2).to(tl.int64) * rows + at, part, mask=inside)


@tuned_recurrence
@triton.jit
def score_gradients(
    x, x_batch, x_token, x_head, n, n_batch, n_token, n_head, mask, cu_seqlens, sequence_of, first_of,
    dscores, scale, spans, time, G, READERS, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, STRICT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale x N^T [b t h C] of rows x that read earlier tokens, STRICT not their own.

    Grid: chunks; heads of x.
    """
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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
    """Gradients [C BF] of rows x, of the keys that they read, and of the decays `here` and `following`."""
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
def read_gradients(
    x, keys, dscores, through, left, since, here, following,
    C: tl.constexpr, BF: tl.constexpr, LEVELS: tl.constexpr, DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of rows x, which read keys of the chunk and, by `through` = d (G x), the state before it.

    -> dx, dkeys [C BF]; of the decays of features what `through_levels` has [C BF], of those of a head the
    terms of pairs of tokens [C C], twice; and those of G [C BF].
    """
    if DECAY == "feature":
        dx, dkeys, dhere, dnext = through_levels(x, keys, dscores, here, following, C, BF, LEVELS, PRECISION)
    else:
        weights = dscores * left
        dx = tl.dot(weights, keys, input_precision=PRECISION)
        dkeys = tl.dot(tl.trans(weights), x, input_precision=PRECISION)
        dhere = weights
        if DECAY == "head":
            dhere = weights * tl.dot(x, tl.trans(keys), input_precision=PRECISION)
        dnext = dhere
    through = through * since
    return dx + through, dkeys, dhere, dnext, x * through


@triton.jit
def store_decay_gradients(
    here, behind, pairs, dnext, before, after, kept, at, inside, real, real_next, G, column, rows,
    F: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Sum up the terms of each decay: of what is left since the beginning of the chunk (`before`), until its
    end (`after`) and of all of it (`kept` [BF]), and what `read_gradients` has."""
    place = tl.arange(0, C)
    if DECAY == "feature":
        total = tl.cumsum(before, 0, reverse=True) + kept[None, :] + pairs
        following = until_last(tl.cumsum(after, 0), C, DECAY) + dnext
        wide = inside[:, None] & (column < F)[None, :]
        target = at[:, None] * F + column[None, :]
        tl.store(here + target, tl.where(real[:, None], total, 0.0), mask=wide)
        tl.store(behind + target, tl.where(real_next[:, None], following, 0.0), mask=wide)
    else:
        later = place[:, None] > place[None, :]
        lying_between = tl.sum(tl.where(later, tl.cumsum(pairs, 0, reverse=True), 0.0), 1)
        total = tl.cumsum(tl.sum(before, 1), 0, reverse=True) + tl.sum(kept, 0) + lying_between
        following = until_last(tl.cumsum(tl.sum(after, 1), 0), C, DECAY)
        target = tl.program_id(2).to(tl.int64) * rows + at
        tl.store(here + target, tl.where(real, total, 0.0), mask=inside)
        tl.store(behind + target, tl.where(real_next, following, 0.0), mask=inside)


@tuned_recurrence
@triton.jit
def feature_gradients(
    q, q_batch, q_token, q_head, k, k_batch, k_token, k_head, n, n_batch, n_token, n_head,
    dy, dy_batch, dy_token, dy_head, log_decay, beta, mask, cu_seqlens, sequence_of, first_of, x, dp, da,
    states, dstates, dq, dk, dbeta, dhere, dnext, scale, rows, spans, time, G, READERS,
    Q_SHARE, K_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ [b t h F] and dK [b t g F]; where there are decays their gradients, of features [b t g F], of heads
    a part of each tile [tiles b t g]; by the DELTA rule the part of dbeta [tiles b t g].

    Grid: chunks; states; tiles of F.
    """
    unit, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BF + tl.arange(0, BF)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    _, _, real_next = locate_tokens(mask, batch, begin, count, first + 1, time, C)
    at = (batch * time + row) * G + g
    place = tl.arange(0, C)
    n += batch * n_batch + g // V_SHARE * n_head
    states += (unit * G + g) * F * E
    dstates += (unit * G + g) * F * E
    to_late = tl.zeros([C, BF], tl.float32)  # d (H K)
    to_early = tl.zeros([C, BF], tl.float32)  # -d (G beta K)
    kept = tl.zeros([BF], tl.float32)
    for tile in range(tl.cdiv(E, BE)):
        column_e = tile * BE + tl.arange(0, BE)
        state = load_state(states, column, column_e, E, F, E)
        dstate = load_state(dstates, column, column_e, E, F, E)
        values = load_rows(n, row, n_token, column_e, real, E).to(tl.float32)
        to_late += tl.dot(values, tl.trans(dstate), input_precision=PRECISION)
        if DELTA:
            solved = load_rows(x, at, E, column_e, real, E)
            to_early += tl.dot(solved, tl.trans(state), input_precision=PRECISION)
        if DECAY != "none":
            kept += tl.sum(state * dstate, 1)

    keys = load_rows(
        k + batch * k_batch + g // K_SHARE * k_head, row, k_token, column, real, F
    ).to(tl.float32)  # fmt: skip
    here = to_late * 0
    following = here
    since = here + 1
    left = tl.where(place[:, None] >= place[None, :], 1.0, 0.0)
    if DECAY == "feature":
        here = load_decay(log_decay, at, real, G, column, 0, F, C, DECAY)
        following = load_decay(log_decay, at, real_next, G, column, 1, F, C, DECAY)
        since = tl.exp(tl.cumsum(here, 0))
        to_late *= tl.exp(tl.cumsum(until_last(following, C, DECAY), 0, reverse=True))
        kept *= tl.exp(tl.sum(here, 0))
    elif DECAY == "head":
        of_head = load_decay(log_decay, at, real, G, place, 0, F, C, DECAY)
        behind = load_decay(log_decay, at, real_next, G, place, 1, F, C, DECAY)
        since *= tl.exp(tl.cumsum(of_head, 0))[:, None]
        to_late *= tl.exp(tl.cumsum(until_last(behind, C, DECAY), 0, reverse=True))[:, None]
        kept *= tl.exp(tl.sum(of_head, 0))
        left = between(of_head, C)
    dkeys = to_late
    after = keys * to_late
    before = to_late * 0
    size: tl.constexpr = BF if DECAY == "feature" else C
    pairs = tl.zeros([C, size], tl.float32)
    further = tl.zeros([C, size], tl.float32)
    if DELTA:
        rate = tl.load(beta + at, mask=real, other=0.0)[:, None]
        weights = load_rows(da, at, C, place, real, C)
        dread, more, pairs, further, before = read_gradients(
            keys * rate,
            keys,
            weights,
            -to_early,
            left,
            since,
            here,
            following,
            C,
            BF,
            LEVELS,
            DECAY,
            PRECISION,
        )
        dkeys += more + rate * dread
        part = tl.program_id(2).to(tl.int64) * rows + at
        tl.store(dbeta + part, tl.where(real, tl.sum(keys * dread, 1), 0.0), mask=inside)
    wide = inside[:, None] & (column < F)[None, :]
    for reader in range(READERS):
        head = g * READERS + reader
        line = (batch * time + row) * (G * READERS) + head
        through = tl.zeros([C, BF], tl.float32)
        for tile in range(tl.cdiv(E, BE)):
            column_e = tile * BE + tl.arange(0, BE)
            given = load_rows(dy + batch * dy_batch + head * dy_head, row, dy_token, column_e, real, E)
            state = load_state(states, column, column_e, E, F, E)
            through += tl.dot(given.to(tl.float32) * scale, tl.trans(state), input_precision=PRECISION)
        queries = load_rows(
            q + batch * q_batch + head // Q_SHARE * q_head, row, q_token, column, real, F
        ).to(tl.float32)  # fmt: skip
        weights = load_rows(dp, line, C, place, real, C)
        dread, more, of_pairs, of_further, of_before = read_gradients(
            queries, keys, weights, through, left, since, here, following, C, BF, LEVELS, DECAY, PRECISION
        )
        dkeys += more
        pairs += of_pairs
        further += of_further
        before += of_before
        tl.store(dq + line[:, None] * F + column[None, :], tl.where(real[:, None], dread, 0.0), mask=wide)
    tl.store(dk + at[:, None] * F + column[None, :], tl.where(real[:, None], dkeys, 0.0), mask=wide)
    if DECAY != "none":
        store_decay_gradients(
            dhere, dnext, pairs, further, before, after, kept, at, inside, real, real_next, G, column, rows,
            F, C, DECAY,
        )  # fmt: skip

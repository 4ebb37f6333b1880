"""The Triton kernels of the recurrences without a denominator, which `triton_recurrence` launches.

A sequence is cut into chunks of C tokens. S is the state before a chunk. Of a feature, L_ts is what tokens
s + 1 to t leave, G_t what the chunk leaves through token t, and H_t what it leaves from there to its end.
lintra/native's recurrence.h has the same letters, and names the papers:

    P_ts = q_t . L_ts k_s          s <= t           `chunk_scores`
    A_ts = beta_t k_t . L_ts k_s   s < t            `chunk_scores`, which keeps T = (I + A)^-1
    W = T (beta G K), U = T (beta V)                `chunk_sides`, with H K
    N = U - W S                    N = V: the sum   `chunk_states`, in order, with
    S' = G_C S + (H K)^T N
    Y = (G Q) S + P N                               `outputs`

All but `chunk_states` work on every chunk at once; it takes one matrix product for each chunk, two with the
delta rule.

**Decays of every feature.** Two tokens of a chunk lie in neighbouring runs of 1, 2, 4, ... tokens at exactly
one level of halving. The decay between them is the decay from the earlier token to the border of these runs
times the decay from the border to the later token, both at most 1. So at every level, one product over the
whole chunk multiplies the tokens of later runs, as readers, by those of earlier runs, and all other pairs are
masked out. This takes log2(C) products on tensor cores, and two exponentials of their operands per token and
level. The logarithms are summed afresh and never subtracted, so they keep their digits next to a token that
decays by a lot, and may be -inf.

**The triangle** is inverted with the same levels: if two neighbouring runs have the inverses X and Y, and B
is the block of A between them, then the inverse of both together has -Y B X in the place of B.

Other letters are those of `triton_kernels`, whose functions find the tokens: BF and BE are tiles of F and E.
DECAY is "none", "head" or "feature". There may be fewer key or value heads than states, with K_SHARE or
V_SHARE states to each, and fewer queries than outputs (Q_SHARE).
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's annotations describe what its compiler makes of a kernel, not the source.
from functools import partial

import triton
import triton.language as tl

from lintra.ops.linear_attention.triton_kernels import (
    load_rows,
    load_state,
    locate_program,
    locate_sequence,
    locate_span,
    locate_tokens,
    narrowed,
    product,
    tuned,
)

# For a program that goes through a sequence: two stages load the next chunk ahead, if there is room. On the
# smallest GPUs there is none, and the tuner leaves such settings out.
_SERIAL = [triton.Config({}, num_warps=n, num_stages=stages) for n, stages in ((4, 2), (8, 2), (8, 1))]
tuned_serial = partial(tuned, tried=_SERIAL)
# A kernel that adds to tensors is not tuned: every trial would add again. Its rows fit into the registers of
# 8 warps.
tuned_accumulating = partial(tuned, tried=[triton.Config({}, num_warps=8, num_stages=1)])


@triton.jit
def load_decay(log_decay, at, real, G, column, AHEAD: tl.constexpr, F: tl.constexpr, C: tl.constexpr,
               DECAY: tl.constexpr):  # fmt: skip
    """Load log decays AHEAD tokens later, [C] of a head or [C BF] of features; 0 if that one is not real."""
    line = at + AHEAD * G
    if DECAY == "feature":
        inside = real[:, None] & (column < F)[None, :]
        found = tl.load(log_decay + line[:, None] * F + column[None, :], mask=inside, other=0.0)
    else:
        found = tl.load(log_decay + line, mask=real, other=0.0)
    return found


@triton.jit
def until_last(following, C: tl.constexpr, DECAY: tl.constexpr):
    """Return the log decays of the following tokens, with 0 for the last: its following token is outside the
    chunk."""
    last = tl.arange(0, C) == C - 1
    if DECAY == "feature":
        last = last[:, None]
    return tl.where(last, 0.0, following)


@triton.jit
def sum_in_runs(x, RUN: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr, BF: tl.constexpr):
    """Cumulative sums [C BF] within each run of RUN tokens, from its first token or from its last."""
    if RUN > 1:
        parts = tl.reshape(x, [C // RUN, RUN, BF])
        x = tl.reshape(tl.cumsum(parts, 1, reverse=REVERSE), [C, BF])
    return x


@triton.jit
def is_late(LEVEL: tl.constexpr, C: tl.constexpr):
    """Mask of the tokens of a chunk in the later of two neighbouring runs of 2**LEVEL."""
    return tl.arange(0, C) // 2**LEVEL % 2 == 1


@triton.jit
def is_last(LEVEL: tl.constexpr, C: tl.constexpr):
    """Mask of the tokens of a chunk that are the last of a run of 2**LEVEL."""
    return (tl.arange(0, C) + 1) % 2**LEVEL == 0


@triton.jit
def across(x, LEVEL: tl.constexpr, C: tl.constexpr):
    """Return x [C C] where its row is in the later of two neighbouring runs and its column in the earlier
    one, and 0 elsewhere."""
    place, late = tl.arange(0, C), is_late(LEVEL, C)
    pair = place // 2 ** (LEVEL + 1)
    kept = (pair[:, None] == pair[None, :]) & late[:, None] & (late == 0)[None, :]
    return tl.where(kept, x, 0.0)


@triton.jit
def to_border(here, following, LEVEL: tl.constexpr, C: tl.constexpr, BF: tl.constexpr):
    """Return the decay [C BF] between each token and the border of its two runs, given the log decays of the
    tokens, `here`, and those of the tokens after them, `following`."""
    following = tl.where(is_last(LEVEL, C)[:, None], 0.0, following)
    since = sum_in_runs(here, 2**LEVEL, False, C, BF)
    until = sum_in_runs(following, 2**LEVEL, True, C, BF)
    return tl.exp(tl.where(is_late(LEVEL, C)[:, None], since, until))


@triton.jit
def between(log_decay, C: tl.constexpr):
    """Return the decay [C C] from each earlier token (column) to each token (row), 1 for a token itself,
    given the log decays of a head [C]."""
    place = tl.arange(0, C)
    later = place[:, None] > place[None, :]
    elapsed = tl.cumsum(tl.where(later, log_decay[:, None], 0.0), 0)
    return tl.where(place[:, None] >= place[None, :], tl.exp(elapsed), 0.0)


@triton.jit
def invert(a, LEVELS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a strictly lower triangular a [C C]."""
    place = tl.arange(0, C)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0) - across(a, 0, C)
    for level in tl.static_range(1, LEVELS):
        right = tl.dot(across(a, level, C), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, right, input_precision=PRECISION)
    return inverse


@tuned
@triton.jit
def chunk_scores(
    x, x_batch, x_token, x_head, k, k_batch, k_token, k_head, log_decay, beta, mask, cu_seqlens,
    sequence_of, first_of, scores, spans, time, G, READERS, X_SHARE, K_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    DECAY: tl.constexpr, SOLVE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
    SOLVED_IN: tl.constexpr,
):  # fmt: skip
    """Compute P [b t h C] from queries x or, with SOLVE, T [b t g C] from x = k and beta.

    Programs: chunks; outputs or, with SOLVE, states.
    """
    heads = G * READERS
    unit, head, _ = locate_program(heads, 1)
    g = head // READERS
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    _, _, real_next = locate_tokens(mask, batch, begin, count, first + 1, time, C)
    at = (batch * time + row) * G + g
    x += batch * x_batch + head // X_SHARE * x_head
    k += batch * k_batch + g // K_SHARE * k_head
    place = tl.arange(0, C)
    itself = place[:, None] == place[None, :]
    total = tl.zeros([C, C], tl.float32)
    for tile in range(tl.cdiv(F, BF)):
        column = tile * BF + tl.arange(0, BF)
        readers = load_rows(x, row, x_token, column, real, F).to(tl.float32)
        keys = load_rows(k, row, k_token, column, real, F).to(tl.float32)
        if DECAY == "feature":
            here = load_decay(log_decay, at, real, G, column, 0, F, C, DECAY)
            following = load_decay(log_decay, at, real_next, G, column, 1, F, C, DECAY)
            total += tl.where(itself, tl.sum(readers * keys, 1)[:, None], 0.0)
            for level in tl.static_range(LEVELS):
                left, late = to_border(here, following, level, C, BF), is_late(level, C)[:, None]
                reading = tl.where(late, readers * left, 0.0)
                read = tl.where(late, 0.0, keys * left)
                pairs = tl.dot(reading, tl.trans(read), input_precision=PRECISION)
                total += across(pairs, level, C)
        else:
            kind = x.dtype.element_ty
            readers, keys = narrowed(readers, kind, EXACT), narrowed(keys, kind, EXACT)
            total = product(readers, keys, total, False, True, "split" if EXACT else PRECISION)
    if DECAY == "head":
        total *= between(load_decay(log_decay, at, real, G, place, 0, F, C, DECAY), C)
    if SOLVE:
        total *= tl.load(beta + at, mask=real, other=0.0)[:, None]
        total = invert(tl.where(place[:, None] > place[None, :], total, 0.0), LEVELS, C, SOLVED_IN)
    else:
        total = tl.where(place[:, None] >= place[None, :], total, 0.0)
    line = (batch * time + row) * heads + head
    tl.store(scores + line[:, None] * C + place[None, :], total, mask=inside[:, None])


@tuned
@triton.jit
def chunk_sides(
    k, k_batch, k_token, k_head, v, v_batch, v_token, v_head, log_decay, beta, mask, cu_seqlens,
    sequence_of, first_of, triangle, late, erasing, new, whole, spans, time, G, K_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute H K as `late` and G_C as `whole` [chunks g F], if there are decays; with the DELTA rule, W as
    `erasing` and U as `new`.

    Programs: chunks; states; tiles of F and, with DELTA, tiles of E after them.
    """
    tiles: tl.constexpr = (F + BF - 1) // BF
    unit, g, tile = locate_program(G, tiles + (E + BE - 1) // BE if DELTA else tiles)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    _, _, real_next = locate_tokens(mask, batch, begin, count, first + 1, time, C)
    at = (batch * time + row) * G + g
    place = tl.arange(0, C)
    inverse = tl.zeros([C, C], tl.float32)
    rate = tl.zeros([C], tl.float32)
    if DELTA:
        inverse = load_rows(triangle, at, C, place, inside, C)
        rate = tl.load(beta + at, mask=real, other=0.0)
    if tile < tiles:
        column = tile * BF + tl.arange(0, BF)
        wide = inside[:, None] & (column < F)[None, :]
        target = at[:, None] * F + column[None, :]
        keys = load_rows(
            k + batch * k_batch + g // K_SHARE * k_head, row, k_token, column, real, F
        ).to(tl.float32)  # fmt: skip
        early = keys
        if DECAY != "none":
            here = load_decay(log_decay, at, real, G, column, 0, F, C, DECAY)
            following = load_decay(log_decay, at, real_next, G, column, 1, F, C, DECAY)
            since = tl.exp(tl.cumsum(here, 0))
            until = tl.exp(tl.cumsum(until_last(following, C, DECAY), 0, reverse=True))
            all_left = tl.exp(tl.sum(here, 0)) + tl.zeros([BF], tl.float32)
            tl.store(whole + (unit * G + g) * F + column, all_left, mask=column < F)
            if DECAY == "head":
                since, until = since[:, None], until[:, None]
            tl.store(late + target, keys * until, mask=wide)
            early = keys * since
        if DELTA:
            solved = tl.dot(inverse, early * rate[:, None], input_precision=PRECISION)
            tl.store(erasing + target, solved, mask=wide)
    elif DELTA:
        # Other names than in the first branch: a name must have one shape in both.
        column_e = (tile - tiles) * BE + tl.arange(0, BE)
        values = load_rows(v + batch * v_batch + g // V_SHARE * v_head, row, v_token, column_e, real, E)
        written = tl.dot(inverse, values.to(tl.float32) * rate[:, None], input_precision=PRECISION)
        inside_e = inside[:, None] & (column_e < E)[None, :]
        tl.store(new + at[:, None] * E + column_e[None, :], written, mask=inside_e)


@tuned_serial
@triton.jit
def chunk_states(
    late, late_batch, late_token, late_head, new, new_batch, new_token, new_head, erasing, whole, mask,
    cu_seqlens, first_of, start, states, written, final, spans, time, G, K_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the state before each chunk of a sequence as `states` [chunks g F E], the state after the last
    as `final` and, with the DELTA rule, N as `written`.

    Grid: sequences; states; tiles of E. BF holds all features.
    """
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column_f, column_e = tl.arange(0, BF), tl.program_id(2) * BE + tl.arange(0, BE)
    unit = tl.load(first_of + i) if first_of is not None else i * spans
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    late += batch * late_batch + g // K_SHARE * late_head
    new += batch * new_batch + g // V_SHARE * new_head
    inside_state = (column_f < F)[:, None] & (column_e < E)[None, :]
    place = column_f[:, None] * E + column_e[None, :]
    state = load_state(start + (i * G + g) * F * E, column_f, column_e, E, F, E)
    for chunk in range(tl.cdiv(count, C).to(tl.int32)):
        at_unit = (unit + chunk) * G + g
        tl.store(states + at_unit * F * E + place, state, mask=inside_state)
        row, inside, real = locate_tokens(mask, batch, begin, count, chunk * C, time, C)
        keys = load_rows(late, row, late_token, column_f, real, F).to(tl.float32)
        values = load_rows(new, row, new_token, column_e, real, E).to(tl.float32)
        if DELTA:
            at = (batch * time + row) * G + g
            values -= tl.dot(load_rows(erasing, at, F, column_f, real, F), state, input_precision=PRECISION)
            wide = inside[:, None] & (column_e < E)[None, :]
            tl.store(written + at[:, None] * E + column_e[None, :], values, mask=wide)
        if DECAY != "none":
            state *= tl.load(whole + at_unit * F + column_f, mask=column_f < F, other=0.0)[:, None]
        state += tl.dot(tl.trans(keys), values, input_precision=PRECISION)
    tl.store(final + (i * G + g) * F * E + place, state, mask=inside_state)


@triton.jit
def fade_since(x, log_decay, at, real, G, column, F: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr):
    """Return rows [C BF] times what the chunk leaves through each token (G)."""
    if DECAY != "none":
        since = tl.exp(tl.cumsum(load_decay(log_decay, at, real, G, column, 0, F, C, DECAY), 0))
        if DECAY == "head":
            since = since[:, None]
        x *= since
    return x


@tuned
@triton.jit
def outputs(
    q, q_batch, q_token, q_head, n, n_batch, n_token, n_head, log_decay, mask, cu_seqlens, sequence_of,
    first_of, states, scores, y, scale, spans, time, G, READERS, Q_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y [b t h E] from the states before chunks, P as `scores`, and N.

    Programs: chunks; outputs; tiles of E.
    """
    heads = G * READERS
    unit, head, tile_e = locate_program(heads, tl.cdiv(E, BE))
    g = head // READERS
    column_e = tile_e * BE + tl.arange(0, BE)
    i, first = locate_span(unit, spans, sequence_of, first_of, C)
    batch, begin, count = locate_sequence(i, cu_seqlens, time)
    row, inside, real = locate_tokens(mask, batch, begin, count, first, time, C)
    at = (batch * time + row) * G + g
    line = (batch * time + row) * heads + head
    q += batch * q_batch + head // Q_SHARE * q_head
    n += batch * n_batch + g // V_SHARE * n_head
    weights = load_rows(scores, line, C, tl.arange(0, C), real, C)
    values = load_rows(n, row, n_token, column_e, real, E).to(tl.float32)
    total = tl.dot(weights, values, input_precision=PRECISION)
    states += (unit * G + g) * F * E
    for tile in range(tl.cdiv(F, BF)):
        column_f = tile * BF + tl.arange(0, BF)
        queries = load_rows(q, row, q_token, column_f, real, F).to(tl.float32)
        queries = fade_since(queries, log_decay, at, real, G, column_f, F, C, DECAY)
        before = load_state(states, column_f, column_e, E, F, E)
        total += tl.dot(queries, before, input_precision=PRECISION)
    wide = inside[:, None] & (column_e < E)[None, :]
    total = tl.where(real[:, None], total * scale, 0.0)
    tl.store(y + line[:, None] * E + column_e[None, :], total, mask=wide)


@triton.jit
def step(
    q, q_batch, q_head, k, k_batch, k_head, v, v_batch, v_head, log_decay, beta, mask, start, final, y, scale,
    G, READERS, Q_SHARE, K_SHARE, V_SHARE,
    F: tl.constexpr, E: tl.constexpr, BF: tl.constexpr, BE: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Compute the recurrence for one token of each sample, in one launch.

    Grid: samples; states; tiles of E. BF holds all features.
    """
    i, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column_f, column_e = tl.arange(0, BF), tl.program_id(2) * BE + tl.arange(0, BE)
    inside_f, inside_e = column_f < F, column_e < E
    at = i * G + g
    real = True
    if mask is not None:
        real = tl.load(mask + i) != 0
    key = tl.load(k + i * k_batch + g // K_SHARE * k_head + column_f, mask=inside_f & real, other=0.0)
    value = tl.load(v + i * v_batch + g // V_SHARE * v_head + column_e, mask=inside_e & real, other=0.0)
    key, value = key.to(tl.float32), value.to(tl.float32)
    state = load_state(start + at * F * E, column_f, column_e, E, F, E)
    if DECAY == "feature":
        state *= tl.exp(tl.load(log_decay + at * F + column_f, mask=inside_f & real, other=0.0))[:, None]
    elif DECAY == "head":
        state *= tl.exp(tl.load(log_decay + at, mask=real, other=0.0))
    if beta is not None:
        rate = tl.load(beta + at, mask=real, other=0.0)
        value = rate * (value - tl.sum(state * key[:, None], 0))
        if mask is not None:  # also where the state is not finite
            value = tl.where(real, value, 0.0)
    state += key[:, None] * value[None, :]
    place = column_f[:, None] * E + column_e[None, :]
    tl.store(final + at * F * E + place, state, mask=inside_f[:, None] & inside_e[None, :])
    for reader in range(READERS):
        head = g * READERS + reader
        query = tl.load(
            q + i * q_batch + head // Q_SHARE * q_head + column_f, mask=inside_f & real, other=0.0
        )
        total = scale * tl.sum(state * query.to(tl.float32)[:, None], 0)
        if mask is not None:  # also where the state is not finite
            total = tl.where(real, total, 0.0)
        tl.store(y + (i * G * READERS + head) * E + column_e, total, mask=inside_e)

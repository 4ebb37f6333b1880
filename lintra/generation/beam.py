"""Beam search: the most probable continuations that a beam of hypotheses finds, for any model with `extend`.

Each hypothesis carries the state of its sequence; where another one takes its place, states are indexed as
hypotheses are. Sutskever et al. 2014, arXiv:1409.3215, section 3.2; the length penalty is that of Wu et al.
2016, arXiv:1609.08144, equation 14.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from lintra.attention import map_state
from lintra.generation.inputs import prepare_inputs
from lintra.generation.sampling import check_recurrent, evaluation, last
from lintra.models import Decoder


class Hypotheses(NamedTuple):
    """Texts that a beam found for each prompt or source, the best first.

    tokens [b k t]: what follows the prompt, filled up with the end symbol; length [b k]: how many of them it
    has, its own end symbol included; log_prob [b k]: of all of them together, in nats, without the penalty.
    k is the width of the beam, or less where there are fewer hypotheses of that length; log_prob is
    -inf for those that only fill it up.
    """

    tokens: Tensor
    length: Tensor
    log_prob: Tensor


@torch.no_grad()
def beam_search(
    model: Decoder,
    prompt: Int[Tensor, "b t"] | None = None,
    *,
    steps: int,
    beam: int,
    end: int | None = None,
    length_penalty: float = 0.0,
    lengths: Int[Tensor, "b"] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
) -> Hypotheses:
    """The `beam` best hypotheses of up to `steps` tokens; prompt, lengths and source are as in `generate`.

    A hypothesis with the symbol `end` is complete. Hypotheses of different lengths compete by
    log_prob / ((5 + length) / 6) ** length_penalty: 0 compares probabilities, which favours short ones. A
    beam that holds every hypothesis is exact. Raises ValueError for a beam below 1, an end that is not a
    symbol, a penalty that is negative or not finite, and what `stream` refuses.
    """
    if isinstance(beam, bool) or not isinstance(beam, int) or beam < 1:
        raise ValueError(f"beam must be an integer of at least 1, got {beam}")
    if not 0 <= length_penalty < math.inf:
        raise ValueError(f"length_penalty must be at least 0 and finite, got {length_penalty}")
    inputs = prepare_inputs(
        model, prompt, steps=steps, end=end, lengths=lengths, source=source, source_mask=source_mask
    )
    check_recurrent(model)
    batch, device = len(inputs.tokens), inputs.tokens.device
    tokens = torch.zeros(batch, 1, 0, dtype=torch.int64, device=device)
    length = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    log_prob = torch.zeros(batch, 1, dtype=torch.float64, device=device)
    done = torch.zeros(batch, 1, dtype=torch.bool, device=device)
    with evaluation(model):
        memory, new, mask = inputs.memory(model), inputs.tokens, inputs.mask
        state = model.start(*memory) if memory else None
        for _ in range(steps):
            params, state = model.extend(new, state, mask=mask)
            following = model.output.log_probs(last(params, mask)).double()
            following = following.unflatten(0, (batch, log_prob.shape[1]))
            candidates = log_prob[..., None] + _once_done(following, done, end)
            longer = length + ~done
            score = candidates / ((5 + longer) / 6)[..., None] ** length_penalty
            symbols = score.shape[2]
            best = score.flatten(1).topk(min(beam, score.shape[1] * symbols), 1).indices
            parent, symbol = best // symbols, best % symbols
            tokens = torch.cat((tokens.gather(1, _along(parent, tokens)), symbol[..., None]), 2)
            log_prob = candidates.flatten(1).gather(1, best)
            length, done = longer.gather(1, parent), done.gather(1, parent)
            if end is not None:
                done = done | (symbol == end)
                if bool(done.all()):
                    break
            rows = (parent + parent.new_tensor(range(batch))[:, None] * score.shape[1]).flatten()
            state = map_state(lambda x, rows=rows: x[rows], state)
            new, mask = symbol.reshape(-1, 1), None
    return Hypotheses(tokens, length, log_prob)


def _once_done(following: Tensor, done: Tensor, end: int | None) -> Tensor:
    """The log-probabilities [b k n] of what follows: a complete hypothesis can only continue as it is."""
    if end is None:
        return following
    stays = following.new_full(following.shape[2:], -math.inf)
    stays[end] = 0.0
    return torch.where(done[..., None], stays, following)


def _along(parent: Tensor, tokens: Tensor) -> Tensor:
    """parent [b k] as an index of tokens [b j t] -> [b k t]."""
    return parent[..., None].expand(-1, -1, tokens.shape[2])

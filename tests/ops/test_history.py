"""Earlier tokens, by the definition: one sequence at a time, real tokens only."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lintra.ops.history import look_back
from lintra.ops.layout import Layout

EMPTY = -7


def by_definition(line, places):
    """line: all real tokens so far. Returns the tokens that many places before each of them."""
    padded = [EMPTY] * max(places) + list(line)
    return [[padded[max(places) + i - place] for place in places] for i in range(len(line))]


PLACES = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(tuple)


@given(places=PLACES, first=st.integers(0, 7), second=st.integers(0, 7), seed=st.integers(0, 99))
def test_across_padding_and_calls(places, first, second, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, (3, first + second), generator=generator)
    mask = torch.rand(3, first + second, generator=generator) < 0.6
    recent = torch.full((3, max(places)), EMPTY)
    parts = []
    for here, real in zip(tokens.split((first, second), 1), mask.split((first, second), 1), strict=True):
        before, recent = look_back(here, recent, places, Layout.of("tokens", here, real))
        parts.append(before)
    before = torch.cat(parts, 1)
    for i in range(3):
        line = tokens[i, mask[i]].tolist()
        assert before[i, mask[i]].tolist() == by_definition(line, places)
        assert recent[i].tolist() == ([EMPTY] * max(places) + line)[-max(places) :]


@given(places=PLACES, lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_packed_sequences_are_each_alone(places, lengths, seed):
    tokens = torch.randint(100, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    recent = torch.full((len(lengths), max(places)), EMPTY)
    layout = Layout.of("tokens", tokens, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    before, after = look_back(tokens, recent, places, layout)
    start = 0
    for i, length in enumerate(lengths):
        piece = tokens[:, start : start + length]
        alone, last = look_back(piece, recent[i : i + 1], places, Layout.of("tokens", piece))
        assert torch.equal(before[:, start : start + length], alone)
        assert torch.equal(after[i : i + 1], last)
        start += length


@pytest.mark.parametrize("places", [(1,), (3, 1)])
def test_without_padding(places):
    tokens = torch.arange(5)[None]
    before, recent = look_back(tokens, torch.full((1, 3), EMPTY), places, Layout.of("tokens", tokens))
    assert before[0].tolist() == by_definition(range(5), places)
    assert recent[0].tolist() == [2, 3, 4]

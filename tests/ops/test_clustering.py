"""Clusters by sign hash, and the blocks that hold their members."""

import pytest
import torch
from torch import Tensor

from lintra.ops.clustering import Blocks, cluster, sign_codes


def codes(time: int, bits: int = 12, heads: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(time)
    return torch.randint(2, (2, heads, time, bits), generator=generator).mul(2).sub(1).float()


def draws(clusters: int, heads: int = 3) -> Tensor:
    return torch.randint(2**31, (heads, clusters), generator=torch.Generator().manual_seed(0))


def test_codes_tell_the_sides():
    x = torch.tensor([1.0, -2.0])[None, None, None]
    planes = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]])
    assert sign_codes(x, planes).tolist() == [[[[1, -1, -1, 1]]]]
    assert sign_codes(3 * x, planes).tolist() == sign_codes(x, planes).tolist()
    assert (sign_codes(torch.zeros(1, 1, 1, 2), planes) == 1).all()


def test_separate_groups_are_found():
    """Three codes, with at most one wrong bit of 12 each; every initial centroid is in another group."""
    base = codes(3)[:, :, torch.arange(30) // 10]
    noisy = base.clone()
    wrong = torch.arange(30) % 12
    noisy[:, :, torch.arange(30), wrong] *= -1
    noisy[:, :, ::5] = base[:, :, ::5]
    found = cluster(noisy, draws(3), iterations=5)
    assert torch.equal(found, (torch.arange(30) // 10).expand(2, 3, 30))


def test_a_centroid_of_as_many_1_as_minus_1_is_1():
    """The last two give (1, -1), nearest to the second; with (-1, -1) the second would join the first."""
    given = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])[None, None]
    found = cluster(given, torch.zeros(1, 2, dtype=torch.int64), iterations=1)
    assert found.tolist() == [[[0, 1, 1]]]


@pytest.mark.parametrize("clusters", [1, 4, 9, 50])
def test_each_member_is_nearest_to_its_own_first_centroid(clusters):
    x = codes(20, bits=30)
    found = cluster(x, draws(clusters), iterations=0)
    runs = min(clusters, 20)
    for b in range(2):
        for h in range(3):
            first = [
                c * 20 // runs + int(draws(clusters)[h, c]) % ((c + 1) * 20 // runs - c * 20 // runs)
                for c in range(runs)
            ]
            assert len(set(first)) == runs
            distance = (x[b, h, :, None] != x[b, h, first]).sum(-1)
            assert torch.equal(found[b, h], distance.min(1).indices)


def test_fewer_tokens_than_clusters_are_a_cluster_each():
    found = cluster(codes(7, bits=40), draws(50), iterations=3)
    assert torch.equal(found, torch.arange(7).expand(2, 3, 7))


def test_no_padded_token_is_a_centroid_or_has_a_say():
    x = codes(20)
    mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(1)) > 0.5
    dirty = x.masked_fill(~mask[:, None, :, None], 1.0)
    found = cluster(dirty, draws(5), iterations=4, mask=mask)
    for b in range(2):
        alone = cluster(x[b : b + 1, :, mask[b]], draws(5), iterations=4)
        assert torch.equal(found[b : b + 1, :, mask[b]], alone)
    nobody = cluster(x, draws(5), iterations=2, mask=torch.zeros(2, 20, dtype=torch.bool))
    assert ((nobody >= 0) & (nobody < 5)).all()


@pytest.mark.parametrize(("time", "clusters", "size"), [(1, 1, 1), (20, 4, 3), (20, 30, 1), (7, 2, 10)])
def test_a_block_holds_members_of_one_cluster(time, clusters, size):
    generator = torch.Generator().manual_seed(time)
    for own in (
        torch.randint(clusters, (2, 3, time), generator=generator),
        torch.full((2, 3, time), clusters - 1),
    ):
        blocks = Blocks.of(own, clusters, size)
        places = blocks.member.flatten(2)
        assert torch.equal(places.gather(2, blocks.place), torch.arange(time).expand_as(own))
        assert torch.equal(blocks.cluster.gather(2, blocks.place // size), own)
        assert blocks.place.sort(-1).values.diff().gt(0).all()
        assert blocks.cluster.shape[2] == -(-time // size) + clusters


def test_the_nearest_centroid_is_the_first_of_equally_near_ones():
    given, sampled = codes(60, bits=3), draws(20)  # with 3 bits many of the 20 centroids are equal
    places = 3 * torch.arange(20) + sampled % 3  # one of each 3 tokens
    centroids = given.gather(2, places[None, ..., None].expand(2, 3, 20, 3))
    near = (given[:, :, :, None] != centroids[:, :, None]).sum(-1)
    first = (near == near.amin(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(cluster(given, sampled, iterations=0), first)

"""Clusters of vectors by sides of random planes: sign hashes, and Lloyd's algorithm between them.

Vyas et al. 2020, "Fast transformers with clustered attention", arXiv:2007.04825, section 3.2. Letters besides
those of the ops: n bits, c clusters.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from lintra.ops.autocast import no_autocast
from lintra.ops.checks import sum_dtype
from lintra.ops.padding import put_last


def sign_codes(
    x: Float[Tensor, "b t h d"], planes: Float[Tensor, "h n d"], bias: Float[Tensor, "h n"] | None = None
) -> Float[Tensor, "b h t n"]:
    """Return the side of each plane on which a vector lies, as 1 and -1: a . b = n - 2 (the Hamming
    distance).

    plane . x + bias >= 0. Without a bias all planes go through 0, and only the direction of x counts.
    float32, which holds these sums exactly; without gradient.
    """
    dtype = sum_dtype(x.dtype)
    with torch.no_grad(), no_autocast(x):
        side = torch.einsum("bthd,hnd->bhtn", x.to(dtype), planes.to(dtype))
        side = (side if bias is None else side + bias[:, None].to(dtype)) >= 0
    return side.to(torch.float32, memory_format=torch.contiguous_format).mul_(2).sub_(1)


def cluster(
    codes: Float[Tensor, "b h t n"],
    draws: Int[Tensor, "h c"],
    *,
    iterations: int,
    mask: Bool[Tensor, "b t"] | None = None,
) -> Int[Tensor, "b h t"]:
    """The cluster of every token, by `iterations` rounds of Lloyd's algorithm in Hamming distance.

    The first centroids are codes of real tokens: the tokens of a sample are cut into c runs, and `draws`,
    non-negative integers, choose one of each run. With fewer real tokens than c, each begins as its own
    cluster. A cluster without members keeps its centroid. Of equally near centroids the first is taken, and a
    tie between 1 and -1 gives 1. Padded tokens have no influence, and the clusters they get mean nothing.
    """
    batch, _, time, bits = codes.shape
    real = torch.ones(batch, time, dtype=torch.bool, device=codes.device) if mask is None else mask
    # With fewer tokens than clusters each token finds its own code first: other centroids may be anything.
    centroids = codes.gather(2, _first(real, draws)[..., None].expand(-1, -1, -1, bits))
    points = functional.pad(codes, (0, 1), value=1.0)  # the last column counts
    voices = points if mask is None else points * real[:, None, :, None]
    nearest = _nearest(points, centroids)
    for _ in range(iterations):
        sums = member_sums(voices, nearest, draws.shape[1])
        majority = (sums[..., :-1] >= 0).to(codes.dtype).mul_(2).sub_(1)
        centroids = torch.where(sums[..., -1:] > 0, majority, centroids)
        nearest = _nearest(points, centroids)
    return nearest


def member_sums(
    x: Float[Tensor, "b h t n"], cluster: Int[Tensor, "b h t"], clusters: int
) -> Float[Tensor, "b h c n"]:
    """Return the sum of the rows of x that belong to each cluster; 0 for an empty one."""
    batch, heads, _, width = x.shape
    first = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * clusters
    # In one axis, since PyTorch sums the first axis faster than others.
    place = (first + cluster).reshape(-1, 1).expand(-1, width)
    sums = x.new_zeros(batch * heads * clusters, width).scatter_add(0, place, x.reshape(-1, width))
    return sums.view(batch, heads, clusters, width)


def _first(real: Bool[Tensor, "b t"], draws: Int[Tensor, "h c"]) -> Int[Tensor, "b h c"]:
    """The tokens that are the first centroids."""
    count = real.sum(1, keepdim=True)
    number = torch.arange(draws.shape[1], device=real.device)
    runs = count.clamp(max=draws.shape[1])
    start, end = (i * count // runs.clamp(min=1) for i in (number, number + 1))
    place = start[:, None] + draws % (end - start).clamp(min=1)[:, None]
    order = put_last(~real)[:, None].expand(-1, draws.shape[0], -1)
    return order.gather(2, place.clamp(max=real.shape[1] - 1))


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid [b h t] of codes with a 1 behind each, of equally near ones the first.

    points [b h t n+1], centroids [b h c n]. PyTorch finds a maximum several times as fast as its place. So
    the place is part of the number, by way of the 1: c dots of a code, whole numbers, leave room for c places
    between them.
    """
    clusters, bits = centroids.shape[-2:]
    with no_autocast(points):
        # Beyond the whole numbers of float32, and of TF32 where a GPU may multiply in it.
        if clusters * (bits + 1) >= 2**24 or (points.is_cuda and clusters > 2**11):
            return (points[..., :-1] @ centroids.mT).argmax(-1)
        backwards = torch.arange(clusters - 1, -1, -1, device=points.device, dtype=points.dtype)
        places = backwards[:, None].expand(*centroids.shape[:-1], 1)
        best = (points @ torch.cat((clusters * centroids, places), -1).mT).amax(-1)
        return (clusters - 1) - best.remainder(clusters).long()


class Blocks(NamedTuple):
    """The members of each cluster side by side, in blocks of m places that hold members of one cluster only.

    There are always t / m + c blocks, rounded up, whatever the sizes of the clusters: places may be empty.
    """

    cluster: Int[Tensor, "b h n"]  # of each block
    member: Int[Tensor, "b h n m"]  # the token in each place, 0 if empty
    place: Int[Tensor, "b h t"]  # of each token, counted through all blocks

    @classmethod
    def of(cls, cluster: Int[Tensor, "b h t"], clusters: int, size: int) -> "Blocks":
        """`size`: places m of a block."""
        batch, heads, time = cluster.shape
        count = cluster.new_zeros(batch, heads, clusters).scatter_add_(2, cluster, torch.ones_like(cluster))
        blocks = (count + size - 1) // size
        last = blocks.cumsum(2)
        tokens = torch.arange(time, device=cluster.device).expand_as(cluster)
        order = cluster.argsort(dim=2, stable=True)
        # How far the first place of a cluster is behind the number of members of those before it.
        shift = (last - blocks) * size - (count.cumsum(2) - count)
        place = torch.empty_like(cluster).scatter(
            2, order, tokens + shift.gather(2, cluster.gather(2, order))
        )
        total = -(-time // size) + clusters
        member = cluster.new_zeros(batch, heads, total * size).scatter(2, place, tokens)
        numbers = torch.arange(total, device=cluster.device)
        owner = (last[:, :, None] <= numbers[:, None]).sum(3).clamp(max=clusters - 1)
        return cls(owner, member.unflatten(2, (total, size)), place)

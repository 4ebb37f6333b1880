"""Agreement between processes of torch.distributed: each compares its values with the others'."""

import hashlib
import json
from typing import Any

import torch.distributed as dist

from lintra.config.fields import shown


class RanksDiffer(ValueError):
    """Something that must be the same on all ranks is not; raised on every one of them."""

    exit_code = 2


def check_alike(what: str, own: dict[str, Any], group: "dist.ProcessGroup | None" = None) -> None:
    """Raise RanksDiffer, on every rank, with the ranks and the names where `own`, called `what`, is not that
    of rank 0. Only digests are sent, unless they differ."""
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    digests = gather_objects(digest, group)
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if not others:
        return
    all_of_them = gather_objects(own, group)
    first, other = all_of_them[0], all_of_them[others[0]]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    told = [f"{name} is {shown(other.get(name))}, not {shown(first.get(name))}" for name in names[:3]]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    raise RanksDiffer(
        f"{what} must be the same on all ranks, but on {others} it is not that of rank 0: on rank "
        f"{others[0]} {', '.join(told)}{more}"
    )


def gather_objects(value: Any, group: "dist.ProcessGroup | None") -> list[Any]:
    """Return the value from each rank."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found

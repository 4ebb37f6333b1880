"""Mechanisms by kind, so that each panel of a picture shows those that are compared with each other."""

from collections.abc import Mapping

from lintra.pictures.lines import Lines

_FAMILIES = {
    "recurrences": ("retention", "gated", "ssd", "delta", "deltanet", "kda"),
    "feature maps and AFT": ("performer", "rfa", "cosformer", "aft", "linear"),
    "windows and landmarks": ("longformer", "bigbird", "longshort", "linformer", "nystromformer"),
    "hashing and clusters": ("lsh", "clustered"),
    "exact": ("softmax",),
}


def families(lines: Lines) -> dict[str, Lines]:
    """Return lines by the family of the mechanism that each is named after, as "lsh-4" or "clustered,
    bidirectional" is; all others are of the last one, "others"."""
    order = {name: i for i, name in enumerate(x for names in _FAMILIES.values() for x in names)}
    place = {name: family for family, names in _FAMILIES.items() for name in names}
    found: dict[str, dict[str, Mapping[int, float]]] = {}
    for line in sorted(lines, key=lambda line: order.get(_mechanism(line), len(order))):
        found.setdefault(place.get(_mechanism(line), "others"), {})[line] = lines[line]
    return dict(found)


def _mechanism(line: str) -> str:
    return line.partition(",")[0].partition("-")[0]

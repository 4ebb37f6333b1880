"""`python -m benchmarks scaling`: what `lintra bench scaling` measures, with --peers beside other libraries.

The attention of other libraries gets the same queries, keys and values. A library that cannot be imported
here, or fails at a length, is left out, and a row says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from lintra.bench import scaling
from lintra.bench.reports import Row
from lintra.bench.timing import Timing

MEASURES = scaling.MEASURES
OTHERS = scaling.Others(names=peers.PEERS, call=peers.call, tell=peers.TELL, counterparts=peers.COUNTERPARTS)


@dataclass(frozen=True, kw_only=True)
class Options(scaling.Options):
    """Options of this benchmark."""

    peers: bool = False  # other libraries too, as far as they are installed


@dataclass(frozen=True, kw_only=True)
class Sizes(scaling.Sizes):
    """The amount of work that is timed."""

    peers: bool = False

    def contestants(self) -> list[str]:
        """Return the names of what is measured; of other libraries, those that can be imported."""
        missing = peers.missing() if self.peers else peers.PEERS
        return [*super().contestants(), *(name for name in peers.PEERS if name not in missing)]


QUICK = Sizes(**{name: getattr(scaling.QUICK, name) for name in scaling.Sizes.__dataclass_fields__})


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Measure everything -> the table's rows and the single timings of a call, named "WHO TOKENS"."""
    rows, timings = scaling.run(sizes, progress, OTHERS)
    if sizes.peers and (missing := peers.missing()):
        rows.insert(0, Row(f"left out, cannot be imported: {', '.join(missing)}", len(missing), "peers"))
    return rows, timings


def details(sizes: Sizes) -> dict[str, object]:
    """Return the versions of the other libraries, for the report."""
    return {"peers": peers.versions() if sizes.peers else {}}


def picture(path: Path, rows: list[Row], timings: dict[str, Timing], sizes: Sizes) -> list[Path]:
    """Draw time and memory of one sequence against its length, in two pictures; others in a panel."""
    return scaling.picture(path, rows, timings, sizes, peers.PEERS if sizes.peers else ())

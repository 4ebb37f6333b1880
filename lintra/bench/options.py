"""The flags of every benchmark."""

from dataclasses import dataclass
from pathlib import Path

from lintra.io.files import refuse_folder


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a benchmark. One with further options derives from this; they name fields of its `Sizes`."""

    out: Path | None = None  # JSON file to write; else benchmarks/results/NAME-CPU.json
    quick: bool = False  # tiny sizes, to see that it works: measures nothing

    def __post_init__(self):
        refuse_folder("out", self.out)
        if self.out is not None and self.out.suffix == ".png":
            raise ValueError(
                f"out is the file for the figures, the picture is written beside it; got {self.out}"
            )

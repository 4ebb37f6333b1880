"""`lintra export --to runtime --model DIR`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lintra import checkpoint
from lintra.cli._arguments import UsageError, parse
from lintra.export import runtime
from lintra.export.runtime import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Write a trained decoder in the format of another program."""

    to: Literal["runtime"]  # one file for the C runtime, natively or in a browser: docs/format.md
    model: Path = Path("mnist-small")  # the folder of a run or checkpoint, or what comes with lintra
    weights: Weights = "float32"  # how they are kept; fewer bits are read in less time
    out: Path | None = None  # the file; else the model's name with .lrt

    def __post_init__(self):
        if self.out is not None and self.out.is_dir():
            raise ValueError(f"out must be a file, got the folder {self.out}")


def export_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra export", description=Options.__doc__ or "")
    out = options.out or Path(f"{options.model.resolve().name}.lrt")
    if options.out is None and out.exists():
        raise UsageError(f"{out} exists: say --out {out} to replace it")
    model = checkpoint.load(options.model)
    runtime.write(model, out, options.weights)
    print(f"{out}: {out.stat().st_size / 2**20:.2f} MiB, weights in {options.weights}")
    return 0

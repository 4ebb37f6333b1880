"""`lintra demo`."""

import dataclasses
import time
from collections.abc import Sequence

from lintra import demo
from lintra.cli.arguments import parse
from lintra.cli.output import Quiet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(demo.Config):
    output: Quiet = dataclasses.field(default_factory=Quiet)


def demo_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra demo", description=demo.Config.__doc__ or "")
    start = time.perf_counter()
    figures, pictures = demo.run(options, verbosity=options.output.verbosity)
    wide = max(len(what) for what, _ in figures)
    print(f"\nafter {time.perf_counter() - start:.0f} seconds:\n")
    for what, figure in figures:
        print(f"  {what:<{wide}}  {figure}")
    print("\npictures:\n" + "\n".join(f"  {path}" for path in pictures))
    return 0

"""`lintra demo`."""

import time
from collections.abc import Sequence

from lintra import demo
from lintra.cli.arguments import parse


def demo_command(args: Sequence[str]) -> int:
    config = parse(demo.Config, args, prog="lintra demo", description=demo.Config.__doc__ or "")
    start = time.perf_counter()
    figures, pictures = demo.run(config)
    wide = max(len(what) for what, _ in figures)
    print(f"\nafter {time.perf_counter() - start:.0f} seconds:\n")
    for what, figure in figures:
        print(f"  {what:<{wide}}  {figure}")
    print("\npictures:\n" + "\n".join(f"  {path}" for path in pictures))
    return 0

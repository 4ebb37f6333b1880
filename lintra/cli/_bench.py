"""`lintra bench WHAT`."""

import dataclasses
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lintra.bench import _report
from lintra.cli._arguments import UsageError, parse

BENCHES = ("attention", "mechanisms", "train", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a benchmark runs."""

    out: Path | None = None  # the JSON file; else bench/results/WHAT-CPU.json, with --quick none
    quick: bool = False  # tiny sizes: shows that it works, measures nothing


def bench(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(f"Measure: lintra bench {{{','.join(BENCHES)}}} [--out FILE] [--quick]")
        return 0
    what = args[0]
    if what not in BENCHES:
        raise UsageError(f"bench must be one of {', '.join(BENCHES)}; got {what!r}")
    from rich.progress import Progress

    module = import_module(f"lintra.bench.{what}")
    options = parse(Options, args[1:], prog=f"lintra bench {what}", description=str(module.__doc__))
    sizes = module.QUICK if options.quick else module.Sizes()
    with Progress(disable=not sys.stdout.isatty(), transient=True) as progress:
        rounds = progress.add_task("measuring, rounds", total=sizes.rounds)
        rows, timings = module.run(sizes, lambda done: progress.update(rounds, completed=done))
    print(_report.table(rows))
    path = options.out or (None if options.quick else _report.default_path(what))
    if path:
        _report.write(path, rows, timings, sizes=dataclasses.asdict(sizes))
        print(f"\nsaved in {path}")
        if hasattr(module, "picture"):
            module.picture(path.with_suffix(".png"), timings, sizes)
            print(f"drawn in {path.with_suffix('.png')}")
    return 0

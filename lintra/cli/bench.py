"""`lintra bench NAME`, and the flags, table and file of any other folder of benchmarks."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from lintra.bench import reports
from lintra.bench.options import Options
from lintra.bench.timing import Timing
from lintra.cli.arguments import UsageError, parse
from lintra.cli.output import Quiet
from lintra.io.files import refuse_unwritable

BENCHES = {
    "attention": "the linear sum against the hardware: the figures of the README",
    "mechanisms": "every mechanism against softmax and its length",
    "scaling": "time and memory up to 65,536 tokens (--device cuda)",
}
# in the folder benchmarks/ of the repository
ELSEWHERE = ("roofline", "train", "decode", "drift", "generation", "runtime", "model", "gpu")


def bench(args: Sequence[str]) -> int:
    """Run one benchmark that comes with lintra -> the exit code."""
    if args and args[0] in ELSEWHERE:
        raise UsageError(
            f"bench {args[0]} measures what only documents quote and does not come with lintra: "
            f"python -m benchmarks {args[0]}, in a checkout of the repository, measures it"
        )
    elsewhere = any(each.rpartition("=")[2] in ("cuda", "-h", "--help") for each in args)
    if os.name == "nt" and args and args[0] in ("attention", "scaling") and not elsewhere:
        raise UsageError(
            f"bench {args[0]} measures peak memory, which is read on Linux and macOS alone: run it there"
        )
    return choose("lintra bench", "lintra.bench", BENCHES, args)


def choose(prog: str, package: str, benches: Mapping[str, str], args: Sequence[str]) -> int:
    """Run the benchmark that the first argument names -> the exit code.

    prog: the words before the name; benches: name of the module -> what it measures, for the help.
    Raises UsageError for another name and for flags that the benchmark does not take.
    """
    if not args or args[0] in ("-h", "--help"):
        wide = max(map(len, benches)) + 2
        listed = "\n".join(f"  {name:<{wide}}{what}" for name, what in benches.items())
        print(f"Measure: {prog} NAME [--out FILE] [--quick]\n\n{listed}")
        return 0
    name = args[0]
    if name not in benches:
        raise UsageError(f"{prog.split()[-1]} must be one of {', '.join(benches)}; got {name!r}")
    return measure(f"{prog} {name}", name, import_module(f"{package}.{name}"), args[1:])


def measure(prog: str, name: str, module: ModuleType, args: Sequence[str]) -> int:
    """Run a benchmark, print its table and save what it found -> 0.

    The module has `run(sizes, progress) -> (rows, timings)`, `Sizes`, its smallest instance `QUICK`,
    `MEASURES`, and if it needs them `Options`, `DEVICE`, `details(sizes)` and
    `picture(path, rows, timings, sizes)`. Instead of `run` and `details` it may have `stages(sizes,
    progress)`, which yields (rows, timings, details) of all that is known so far: the file is written each
    time, so that an end before the last keeps what was measured. The command in the file is `prog` with
    `args`.
    """
    from rich.progress import Progress

    reports.commit()  # before anything is measured
    form: type[Options] = getattr(module, "Options", Options)
    parts = [("bench", form), ("output", Quiet)]
    fields = [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in parts]
    flags: Any = dataclasses.make_dataclass("Flags", fields, frozen=True)
    given = parse(flags, args, prog=prog, description=str(module.__doc__))
    options: Any = given.bench
    own = {field.name for field in dataclasses.fields(form)} - {x.name for x in dataclasses.fields(Options)}
    sizes = dataclasses.replace(
        module.QUICK if options.quick else module.Sizes(), **{each: getattr(options, each) for each in own}
    )
    device = getattr(options, "device", getattr(module, "DEVICE", "cpu"))
    path = options.out or (None if options.quick else reports.default_path(name, device))
    refuse_unwritable(path)
    hidden = given.output.quiet or not sys.stdout.isatty()
    staged = hasattr(module, "stages")
    rows, timings = [], {}

    def save(rows: list[reports.Row], timings: Mapping[str, Timing], details: dict[str, Any]) -> None:
        if path:
            details |= {"measures": module.MEASURES, "sizes": dataclasses.asdict(sizes)}
            reports.write(path, rows, timings, command=" ".join([prog, *args]), **details)

    with Progress(disable=hidden, transient=True) as progress:
        turns = progress.add_task("measuring", total=sizes.turns if hasattr(sizes, "turns") else sizes.rounds)

        def advance(done: int) -> None:
            progress.update(turns, completed=done)

        if staged:
            for rows, timings, details in module.stages(sizes, advance):
                save(rows, timings, details)
        else:
            rows, timings = module.run(sizes, advance)
    print(reports.table(rows))
    if path:
        if not staged:
            save(rows, timings, module.details(sizes) if hasattr(module, "details") else {})
        print(f"\nsaved in {path}")
        if hasattr(module, "picture"):
            for file in module.picture(path.with_suffix(".png"), rows, timings, sizes):
                print(f"saved in {file}")
    return 0

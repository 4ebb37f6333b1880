"""`lintra bench WHAT`."""

import dataclasses
import sys
from collections.abc import Sequence
from importlib import import_module

from lintra.bench import _report
from lintra.bench._options import Options
from lintra.cli._arguments import UsageError, parse

BENCHES = {
    "attention": "the linear sum against the hardware: the figures of the README",
    "mechanisms": "every mechanism against softmax and its length",
    "scaling": "time and memory up to 65,536 tokens (--peers, --device cuda)",
    "roofline": "what bounds the linear sum, arithmetic or memory",
    "train": "a training step of the image model with every mechanism",
    "decode": "the next token against its position",
    "drift": "what decoding loses with a state in bfloat16",
    "generation": "images a second on the CPU, fused (--model: rounded weights)",
    "runtime": "the C runtime, native and in a browser (--model: rounded weights)",
    "model": "the paper's model against the length, in training and decoding",
    "gpu": "the kernels on a GPU, a training step, decoding",
}


def bench(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        told = "\n".join(f"  {name:<11}{what}" for name, what in BENCHES.items())
        print(f"Measure: lintra bench WHAT [--out FILE] [--quick]\n\n{told}")
        return 0
    what = args[0]
    if what not in BENCHES:
        raise UsageError(f"bench must be one of {', '.join(BENCHES)}; got {what!r}")
    from rich.progress import Progress

    module = import_module(f"lintra.bench.{what}")
    form: type[Options] = getattr(module, "Options", Options)
    options = parse(form, args[1:], prog=f"lintra bench {what}", description=str(module.__doc__))
    own = {field.name for field in dataclasses.fields(form)} - {x.name for x in dataclasses.fields(Options)}
    sizes = dataclasses.replace(
        module.QUICK if options.quick else module.Sizes(), **{name: getattr(options, name) for name in own}
    )
    with Progress(disable=not sys.stdout.isatty(), transient=True) as progress:
        turns = progress.add_task("measuring", total=sizes.turns if hasattr(sizes, "turns") else sizes.rounds)
        rows, timings = module.run(sizes, lambda done: progress.update(turns, completed=done))
    print(_report.table(rows))
    device = getattr(options, "device", getattr(module, "DEVICE", "cpu"))
    path = options.out or (None if options.quick else _report.default_path(what, device))
    if path:
        details = module.details(sizes) if hasattr(module, "details") else {}
        details |= {"measures": module.MEASURES, "sizes": dataclasses.asdict(sizes)}
        _report.write(path, rows, timings, **details)
        print(f"\nsaved in {path}")
        if hasattr(module, "picture"):
            for drawn in module.picture(path.with_suffix(".png"), rows, timings, sizes):
                print(f"drawn in {drawn}")
    return 0

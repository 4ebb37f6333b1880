"""`lintra list` and `lintra info`."""

import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import lintra
from lintra import attention, compat, native, runtime
from lintra.ops import dispatch

CHUNKED_IS_SLOWER = 5  # forward + backward, in the figures of benchmarks/results/


def list_mechanisms(args: Sequence[str]) -> int:
    """The mechanisms as a table, or with --json as a JSON array."""
    if list(args) in (["-h"], ["--help"]):
        print("lintra list [--json | --markdown]: the mechanisms and what they can do")
        print("lintra list --families [--json]: models of transformers on our CPU kernels")
        return 0
    if "--families" in args and set(args) <= {"--families", "--json"}:
        return _list_families(json_wanted="--json" in args)
    if list(args) not in ([], ["--json"], ["--markdown"]):
        raise ValueError(f"list takes only --json, --markdown or --families, got {' '.join(args)!r}")
    mechanisms = attention.describe()
    for reason in attention.broken().values():
        print(f"left out: {reason}", file=sys.stderr)
    if list(args) == ["--json"]:
        print(json.dumps(mechanisms, indent=1))
        return 0
    words: dict[str | bool, str] = {True: "yes", False: "no"}
    columns = ["name", "paper", "causal", "bidirectional", "cross", "recurrent", "state", "cost"]
    rows = [columns, *([str(words.get(m[c], m[c])) for c in columns] for m in mechanisms)]
    if args:
        rows.insert(1, ["---"] * len(columns))
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    else:
        _print_table(rows)
    return 0


def _list_families(json_wanted: bool) -> int:
    """Print how models of transformers did on lintra's kernels, by the report of this version."""
    report = json.loads((Path(compat.__file__).parent / "families.json").read_text())
    if json_wanted:
        print(json.dumps(report, indent=1))
        return 0
    columns = ["family", "recurrence", "logits", "cached logits", "gradients", "same tokens"]
    rows = [columns]
    for name, each in report["families"].items():
        errors = (f"{each[what]:.0e}" for what in ("logits", "cached", "gradients"))
        same = "yes" if each["same_tokens"] else "no"
        rows.append([name, each["recurrence"], *errors, same])
    _print_table(rows)
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(
        f"\nlargest relative errors in float32 against transformers' own functions; checked with {versions}"
    )
    return 0


def info(args: Sequence[str]) -> int:
    """Print what there is on this machine and what runs on it."""
    if list(args) in (["-h"], ["--help"]):
        print("lintra info: versions, CPU, native library, which implementation serves each op")
        return 0
    if args:
        raise ValueError(f"info takes no arguments, got {' '.join(args)!r}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _print_table(
        [
            ["lintra", lintra.__version__],
            ["torch", torch.__version__],
            ["python", platform.python_version()],
            ["platform", platform.platform()],
            ["CPU", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"],
            ["GPU", ", ".join(gpus) or "none"],
            [
                "native",
                f"no: {native.why_not()}; chunked PyTorch is used, about {CHUNKED_IS_SLOWER} times slower"
                if native.why_not()
                else f"{native.instruction_set()}, of {', '.join(native.instruction_sets())}",
            ],
            [
                "decoding",
                "operator by operator"
                if native.why_not()
                else "one native call a token for float32 decoders with linear attention, elu+1 or relu",
            ],
            [
                "runtime",
                f"no: {runtime.why_not()}; lintra generate --engine runtime needs it"
                if runtime.why_not()
                else "lintra generate --engine runtime draws with one C program, as an exported model does",
            ],
        ]
    )
    print("\nWhich implementation serves each op here (float32), and on what:\n")
    rows = [[row.op, row.implementation, row.serves or "-", row.reason] for row in dispatch.explain()]
    _print_table([["op", "implementation", "serves", "what it is, or why not"], *rows])
    return 0


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())

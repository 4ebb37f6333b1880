"""Reports of benchmarks: rows to read, and a JSON file that records how they were measured."""

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lintra
from lintra.bench.timing import Timing
from lintra.io.files import write_atomically


@dataclass(frozen=True)
class Row:
    """One figure and what it should be."""

    what: str
    figure: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.at_least is None and self.at_most is None:
            return None
        enough = self.at_least is None or self.figure >= self.at_least
        return enough and (self.at_most is None or self.figure <= self.at_most)

    @property
    def target(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g} {self.unit}".rstrip()
        if self.at_least is not None:
            return f">= {self.at_least:g} {self.unit}"
        return "" if self.at_most is None else f"<= {self.at_most:g} {self.unit}"


def table(rows: list[Row]) -> str:
    """The rows for the terminal: what, figure, target, met or not."""
    words = {True: "met", False: "MISSED", None: ""}
    wide = max(len(row.what) for row in rows)
    return "\n".join(
        f"{row.what:<{wide}}  {row.figure:>10,.3g} {row.unit:<8}  {row.target:<14} {words[row.met]}".rstrip()
        for row in rows
    )


def write(path: Path, rows: list[Row], timings: Mapping[str, Timing], **more: object) -> None:
    """Save all of it as JSON, atomically."""
    save(
        path,
        rows=[{**asdict(row), "target": row.target, "met": row.met} for row in rows],
        timings_in_seconds={name: timing.as_json() for name, timing in timings.items()},
        **more,
    )


def save(path: Path, **content: object) -> None:
    """Save the results as JSON, atomically, with the command, commit, machine and versions they come from,
    and a checksum that reveals changes by hand.

    Benchmarks add `measures`: the files and folders of the repository whose changes may change the figures.
    Raises ValueError for numbers that are not finite.
    """
    report = {
        "format": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["lintra", *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(),
        "versions": {
            "lintra": lintra.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **content,
    }
    report["checksum"] = checksum(report)
    text = json.dumps(report, indent=1, allow_nan=False)  # NaN is not JSON
    write_atomically(path, lambda temporary: temporary.write_text(text))


def checksum(report: Mapping[str, Any]) -> str:
    """sha256 of all of a report but its checksum, as JSON without spaces whose keys are sorted."""
    content = json.loads(json.dumps({name: x for name, x in report.items() if name != "checksum"}))
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def by_name(report: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a saved report: what -> figure."""
    return {row["what"]: row["figure"] for row in report["rows"]}


def commit() -> str | None:
    """Return the commit of the source tree that lintra is imported from, when a program first asked, with "+"
    behind it if what is measured or measures was changed since; None outside of a git checkout of lintra, as
    where it is installed in an environment that lies inside another project's.

    Programs that run for long ask as they start: a commit made meanwhile is not of the code that ran."""
    now, first = _commit(), _first_commit()
    return first if first is None or now == first else f"{first.rstrip('+')}+"


@functools.cache
def _first_commit() -> str | None:
    return _commit()


def _commit() -> str | None:
    """Return the commit that is checked out, with "+" behind it if files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(lintra.__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails where the checkout is not lintra's
        programs = (":(top,glob)benchmarks/**/*.py", ":(top,glob)experiments/**/*.py")
        built = (":(top)CMakeLists.txt", ":(top)pyproject.toml")
        changed = git("status", "--porcelain", "--untracked-files=all", "--", ".", *programs, *built)
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, object]:
    """CPU and its kind, cores, threads, GPU if there is one, memory in GB, operating system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "cpu": cpu(),
        "kind": _kind(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_gb": round(pages / 1e9, 1),
        "system": platform.platform(),
    }


def cpu() -> str:
    """The CPU's own name, where the system reports it."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    named = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _kind() -> str | None:
    """The family, model, stepping and last level of cache of the CPU, to tell processors of one name apart;
    None where the system does not say."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    names = ("cpu family", "model", "stepping", "cache size")
    found = (re.search(rf"^{name}\s*:\s*(.+)$", info, re.MULTILINE) for name in names)
    return ", ".join(f"{name} {each[1].strip()}" for name, each in zip(names, found, strict=True) if each)


def default_path(what: str, device: str = "cpu") -> Path:
    """benchmarks/results/WHAT-CPU.json, or with the name of the GPU."""
    name = torch.cuda.get_device_name() if device == "cuda" else cpu()
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b", " ", name)
    return (
        Path("benchmarks") / "results" / f"{what}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    )

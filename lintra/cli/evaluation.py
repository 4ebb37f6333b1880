"""The line above the scores of `lintra evaluate`, and its JSON file, for every kind of task."""

import time
from typing import Any

from lintra import checkpoint
from lintra.bench import reports
from lintra.checkpoint import to_json
from lintra.cli.model import SPLITS, Opened


class Evaluation:
    """One evaluation of a model on a task's `total` test samples, from now on."""

    def __init__(self, opened: Opened, options: Any, total: int):
        self.task, self.options, self.total = opened.task, options, total
        self.parameters = sum(p.numel() for p in opened.model.parameters())
        self.weights = None if options.json is None else checkpoint.digest(opened.folder)
        self.start = time.perf_counter()
        self.seconds = 0.0

    def finish(self, scored: int, unit: str, *more: str) -> None:
        """Print how many samples were scored, in how many seconds."""
        self.seconds = time.perf_counter() - self.start
        part = "all" if scored == self.total else f"{scored:,} of"
        of = f"{part} {self.total:,} {SPLITS[self.task.judged_by]} {unit}"
        words = [f"{self.parameters / 1e6:.2f} M parameters", of, *more, f"{self.seconds:.1f} s"]
        print(f"{self.task.name}: {', '.join(words)}\n")

    def save(self, scores: Any, partial: bool, **more: Any) -> None:
        """Write the file of --json, if there is one. partial: scoring was stopped before its end."""
        if self.options.json is None:
            return
        reports.save(
            self.options.json,
            model=str(self.options.model),
            weights=self.weights,
            parameters=self.parameters,
            task=to_json(self.task.config),
            test_samples=self.total,
            partial=partial,
            scores=scores,
            seconds=self.seconds,
            **more,
        )
        print(f"\nsaved in {self.options.json}")

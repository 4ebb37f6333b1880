"""Scores to compare with, of rules that train no network: a report of each program that measures some."""

import json
from collections.abc import Mapping
from pathlib import Path

from experiments.compare.problems import Study
from lintra.bench import reports

Baselines = Mapping[str, Mapping[str, float]]  # problem -> rule -> accuracy on the test samples


def publish(path: Path, baselines: Baselines, *, command: str, **more: object) -> None:
    """Save a report with the baselines, and print them."""
    reports.save(path, command=command, baselines=baselines, **more)
    for problem, scores in baselines.items():
        for rule, score in scores.items():
            print(f"{problem}, {rule}: {100 * score:.1f} %")


def read(study: Study) -> dict[str, dict[str, float]]:
    """The baselines of a study's problems, from those of its reports that exist."""
    found: dict[str, dict[str, float]] = {}
    for name in study.baselines:
        file = study.folder / name
        for problem, scores in json.loads(file.read_text())["baselines"].items() if file.exists() else ():
            found.setdefault(problem, {}).update(scores)
    return found

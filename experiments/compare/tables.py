"""Tables and pictures of the comparison, made from the outcomes alone."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.compare import baselines, contestants, problems
from experiments.compare.problems import COMPARISON, Study
from experiments.compare.search import SEEDS, read_outcomes
from experiments.trials import interval, markdown
from lintra import pictures
from lintra.bench import reports

Outcomes = Sequence[dict[str, Any]]


def by_contest(outcomes: Outcomes, study: Study = COMPARISON) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The outcomes of each (problem, contestant), in the order of problems and contestants."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for x in outcomes:
        found.setdefault((x["problem"], x["contestant"]), []).append(x)
    ordered = itertools.product(study.by_name, contestants.BY_NAME)
    return {key: found[key] for key in ordered if key in found}


def finals(outcomes: Outcomes, study: Study) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """The tested trainings of each (problem, contestant, steps) whose seeds are all done, in their order.

    Raises ValueError if two rates have some: the search was repeated, and the outcomes of one rate are old.
    """
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for (name, who), mine in by_contest(outcomes, study).items():
        for x in sorted(mine, key=lambda x: (x["steps"], x["rate"], x["seed"])):
            if x["final"]:
                found.setdefault((name, who, x["steps"]), []).append(x)
    for key, mine in found.items():
        if len({x["rate"] for x in mine}) > 1:
            raise ValueError(
                f"{', '.join(map(str, key))} steps: tested at several rates; delete the old outcomes"
            )
    return {key: mine for key, mine in found.items() if len(mine) == len(SEEDS)}


def formatted(runs: Outcomes, problem: problems.Problem) -> str:
    """The mean test score and its interval as a table shows them; an accuracy is in percent."""
    if any(x["diverged"] for x in runs):
        return "diverged"
    mean, half = interval([x["test"] for x in runs])
    return f"{_shown(mean, problem)} ± {_shown(half, problem)}"


def _shown(score: float, problem: problems.Problem) -> str:
    return f"{100 * score:.1f}" if problem.score == "accuracy" else f"{score:.3f}"


def _unit(problem: problems.Problem) -> str:
    return "%" if problem.score == "accuracy" else "bits/byte"


def _each(runs: Outcomes, problem: problems.Problem) -> str:
    """The test score of each seed."""
    return ", ".join("diverged" if x["diverged"] else _shown(x["test"], problem) for x in runs)


def _rate(rate: float, tried: set[float]) -> str:
    """A learning rate, marked if it is the first or last of those that were tried."""
    ends = {min(tried): " (lowest)", max(tried): " (highest)"} if tried else {}
    return f"{rate:g}{ends.get(rate, '')}"


def problem_table(outcomes: Outcomes, name: str, study: Study = COMPARISON) -> str:
    """A row for each contestant and number of steps whose search is done: few steps first, then the best;
    then those that diverged at every rate, and the baselines."""
    problem = study.by_name[name]
    heads = [
        "contestant",
        f"test, {_unit(problem)}",
        "each seed",
        "rate",
        "steps",
        "state, bytes",
        "parameters",
        "minutes, fastest run",
    ]
    rows: list[tuple[int, float, list[str]]] = []
    tried: dict[str, set[float]] = {}
    for x in outcomes:
        if x["problem"] == name and not x["final"]:
            tried.setdefault(x["contestant"], set()).add(x["rate"])
    for (where, who, steps), mine in finals(outcomes, study).items():
        if where != name:
            continue
        first = mine[0]
        state = "" if first["state_bytes"] is None else f"{first['state_bytes']:,}"
        minutes = min(x["seconds"] for x in mine) / 60  # the others ran beside more work
        cells = [
            who,
            formatted(mine, problem),
            _each(mine, problem),
            _rate(first["rate"], tried.get(who, set())),
            f"{steps:,}",
            state,
        ]
        cells += [f"{first['parameters']:,}", f"{minutes:.2f}"]
        rows.append((steps, _order(mine, problem), cells))
    rows.sort(key=lambda row: row[:2])
    table = [heads, *(cells for _, _, cells in rows)]
    empty, lost = [""] * (len(heads) - 2), _lost(outcomes, name, study)
    table += [[who, "diverged at every rate", *empty] for who in lost]
    for rule, score in baselines.read(study).get(name, {}).items():
        table.append([f"*{rule}*", _shown(score, problem), *empty])
    place = heads.index("state, bytes")
    if not any(cells[place] for cells in table[1:]):  # encoders keep no state
        table = [[*cells[:place], *cells[place + 1 :]] for cells in table]
    return _table(table[0], table[1:]) if rows or lost else ""


def _order(runs: Outcomes, problem: problems.Problem) -> float:
    """Return the key by which rows are sorted: the best mean score first, last where a seed diverged."""
    if any(x["diverged"] for x in runs):
        return math.inf
    mean = statistics.mean(x["test"] for x in runs)
    return mean if problem.lower_is_better else -mean


def _lost(outcomes: Outcomes, name: str, study: Study) -> list[str]:
    """The contestants whose search of a problem is done because all trainings of the first rung diverged."""
    rates = set(study.by_name[name].rates)
    return [
        who
        for (where, who), mine in by_contest(outcomes, study).items()
        if where == name and all(x["diverged"] for x in mine) and {x["rate"] for x in mine} >= rates
    ]


def points_table(outcomes: Outcomes, name: str, study: Study = COMPARISON) -> str:
    """All validation scores of the search on a problem: a row for each contestant and number of steps."""
    problem = study.by_name[name]
    rows = []
    for (where, who), mine in by_contest(outcomes, study).items():
        if where != name:
            continue
        searched = [x for x in mine if not x["final"]]
        for steps in sorted({x["steps"] for x in searched}):
            at = {x["rate"]: x for x in searched if x["steps"] == steps}
            rows.append([who, f"{steps:,}", *(_point(at.get(rate), problem) for rate in problem.rates)])
    heads = ["contestant", "steps", *(f"rate {rate:g}" for rate in problem.rates)]
    return _table(heads, rows) if rows else ""


def _point(outcome: dict[str, Any] | None, problem: problems.Problem) -> str:
    if outcome is None:
        return ""
    return "diverged" if outcome["diverged"] else _shown(outcome["validation"], problem)


def maps_table(outcomes: Outcomes, study: Study = COMPARISON) -> str:
    """The study of feature maps: a row for each map, a column for each problem and steps that all have."""
    done = finals(outcomes, study)
    columns = [
        (name, steps)
        for name, steps in dict.fromkeys((name, steps) for name, _, steps in done)
        if all((name, who, steps) in done for who in contestants.MAPS)
    ]
    if not columns:
        return ""
    rows = [
        [who, *(formatted(done[name, who, steps], study.by_name[name]) for name, steps in columns)]
        for who in contestants.MAPS
    ]
    heads = [f"{name}, {steps:,} steps, {_unit(study.by_name[name])}" for name, steps in columns]
    return _table(["feature map", *heads], rows)


def across(columns: Mapping[str, tuple[Study, str]]) -> str:
    """Contestants against problems, head -> problem of a study: the test scores after the small preset's
    steps, the best of the first column first. docs/choosing.md has such a table."""
    scores: dict[str, dict[str, tuple[float, str]]] = {}
    for head, (study, name) in columns.items():
        problem = study.by_name[name]
        for (where, who, steps), mine in finals(read_outcomes(study), study).items():
            if where == name and steps == problem.steps["small"]:
                scores.setdefault(who, {})[head] = _order(mine, problem), formatted(mine, problem)
    missing = (math.inf, "")
    rows = sorted(scores, key=lambda who: [scores[who].get(head, missing)[0] for head in columns])
    cells = [[who, *(scores[who].get(head, missing)[1] for head in columns)] for who in rows]
    return _table(["mechanism", *columns], cells)


def core_hours(outcomes: Outcomes) -> float:
    """The hours of all trainings, each on one core."""
    return sum(x["seconds"] for x in outcomes) / 3600


def sections(outcomes: Outcomes, study: Study = COMPARISON) -> str:
    """The test scores as README.md has them, and the hours; nothing for problems without an outcome."""
    parts = []
    for name, problem in study.by_name.items():
        if table := problem_table(outcomes, name, study):
            parts += [f"### {problem.title}", table]
    if maps := maps_table(outcomes, study):
        parts += ["### Feature maps at equal state size", maps]
    diverged = sum(x["diverged"] for x in outcomes)
    parts.append(
        f"In all: {len(outcomes):,} runs, of which {diverged} diverged, in "
        f"{core_hours(outcomes):.2f} core hours."
    )
    return "\n\n".join(parts)


def searches(outcomes: Outcomes, study: Study = COMPARISON) -> str:
    """The page of all validation scores of the searches."""
    parts = [
        "# Validation scores of the searches",
        "The rates of [README.md](README.md) were chosen by these scores, of one seed each. Written by "
        f"`{study.command} --tables`.",
    ]
    for name, problem in study.by_name.items():
        if points := points_table(outcomes, name, study):
            parts += [f"## {problem.title}, {_unit(problem)}", points]
            if problem.score == "accuracy":  # drawn as percentages
                parts.append(f"![{problem.title} against the learning rate](rates-{name}.png)")
    return "\n\n".join(parts) + "\n"


def draw(outcomes: Outcomes, folder: Path, study: Study = COMPARISON) -> None:
    """Draw the recall-memory frontier for each number of steps, and the rates that were searched."""
    guesses: dict[tuple[int, int], dict[str, float]] = {}  # the best of each
    for name, rules in baselines.read(study).items():
        if name.startswith("mqar-"):
            best = max(rules, key=rules.__getitem__)
            guesses[_mqar(name)] = {best: 100 * rules[best]}
    for (length, pairs, steps), seeds in _frontiers(outcomes, study).items():
        lines = {
            who: {size: statistics.mean(scores) for size, scores in sorted(line.items())}
            for who, line in seeds.items()
        }
        _percentages(
            folder / f"frontier-{length}-{pairs}-{steps}.png",
            lines,
            ranges={
                who: {size: (min(scores), max(scores)) for size, scores in line.items()}
                for who, line in seeds.items()
            },
            x="state (KiB)",
            y="recalled (%)",
            title=f"{pairs} pairs in {length} tokens, {steps:,} steps: recall against memory",
            levels=guesses.get((length, pairs)),
        )
    for name, problem in study.by_name.items():
        first = min(problem.steps.values()) // 2**problem.halvings
        lines = {}
        for x in sorted(outcomes, key=lambda x: x["rate"]):
            if x["problem"] == name and x["steps"] == first and not (x["final"] or x["diverged"]):
                lines.setdefault(x["contestant"], {})[x["rate"]] = 100 * x["validation"]
        if lines and problem.score == "accuracy":
            _percentages(
                folder / f"rates-{name}.png",
                lines,
                x="learning rate",
                y="validation accuracy (%)",
                title=f"{problem.title}: {first:,} steps, the first of the search",
            )


def _frontiers(
    outcomes: Outcomes, study: Study
) -> dict[tuple[int, int, int], dict[str, dict[float, list[float]]]]:
    """(length, pairs, steps) -> contestant -> KiB of state -> % recalled by each seed; only where one state
    is twice another, and without contestants of which a seed diverged."""
    found: dict[tuple[int, int, int], dict[str, dict[float, list[float]]]] = {}
    for (name, who, steps), mine in finals(outcomes, study).items():
        size = mine[0]["state_bytes"]
        if name.startswith("mqar-") and size is not None and not any(x["diverged"] for x in mine):
            line = found.setdefault((*_mqar(name), steps), {}).setdefault(who, {})
            line[size / 2**10] = [100 * x["test"] for x in mine]
    sizes = {key: [size for line in lines.values() for size in line] for key, lines in found.items()}
    return {key: lines for key, lines in found.items() if max(sizes[key]) >= 2 * min(sizes[key])}


def _percentages(path: Path, lines: dict[str, dict[Any, float]], **more: Any) -> None:
    """Lines in panels by family; softmax is in every panel if they do not all fit into one."""
    softmax = {name: line for name, line in lines.items() if name == "softmax"}
    others = {name: line for name, line in lines.items() if name not in softmax}
    pictures.percentages(path, softmax, others=pictures.families(others), **more)


def _mqar(name: str) -> tuple[int, int]:
    length, pairs = name.split("-")[1:3]
    return int(length), int(pairs)


def write(study: Study = COMPARISON, folder: Path | None = None) -> str:
    """Write points.json and searches.md, all points of all searches, and draw the pictures -> the tables for
    README.md. In `folder`, or in that of the study."""
    found, folder = read_outcomes(study), folder or study.folder
    reports.save(folder / "points.json", command=f"{study.command} --tables", points=points(found))
    (folder / "searches.md").write_text(searches(found, study))
    draw(found, folder, study)
    return sections(found, study)


def points(outcomes: Outcomes) -> list[dict[str, Any]]:
    """All trainings, with the fields that tables show."""
    names = (
        *("problem", "contestant", "rate", "steps", "seed", "final", "diverged", "validation", "test"),
        *("seconds", "parameters", "state_bytes"),
    )
    return [{name: x[name] for name in names} for x in outcomes]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown([heads, ["---"] * len(heads), *rows])

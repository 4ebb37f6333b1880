"""How much a recogniser's errors depend on which recordings of digits follow each other.

    python experiments/speech/arrangements.py --data DIR [--model spoken-digits]

The test set of the Free Spoken Digit Dataset is 300 recordings of one digit each. A seed decides which of
them are joined to strings, and in which order; every arrangement holds each recording once. The results are
saved beside the model, where experiments/ship.py reads them for the model's card.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from lintra import checkpoint, evaluate
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.bench.reports import Row
from lintra.models import CTC
from lintra.speech import Search, corpora
from lintra.speech.corpus import prepare

RESULTS = "arrangements.json"  # in the model's folder
MODEL = "spoken-digits"
DIGITS = ((1, 7), (20, 20), (50, 50))  # the fewest and the most of a string
SEEDS = range(31)


def name(fewest: int, most: int) -> str:
    """Name strings of so many digits."""
    return f"strings of {fewest} to {most} digits" if fewest < most else f"strings of {most} digits"


def error_rates(model: CTC, data: Path, joined: tuple[int, int], seed: int) -> dict[str, float]:
    """The shares of wrong words and characters in one arrangement."""
    corpus, _ = prepare(
        corpora.fsdd(data, joined=joined, seed=seed)["test"], model.config.features, cache=None
    )
    heard, _ = evaluate.transcripts(model, corpus, range(len(corpus)), Search(), batch=8)
    return {kind: rate.rate for kind, rate in evaluate.error_rates(heard, "word").items()}


def rows(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """The mean of all arrangements, and how much they differ."""
    made = []
    for strings, rates in found.items():
        words = [100 * rate["word"] for rate in rates]
        statistic = {"mean": statistics.mean(words), "standard deviation": statistics.stdev(words)}
        statistic |= {"least": min(words), "most": max(words)}
        made += [Row(f"{strings}, word errors, {what}", figure, "%") for what, figure in statistic.items()]
    return made


def table(report: dict[str, Any]) -> str:
    """A row for each length of strings."""
    figures, columns = reports.by_name(report), ("mean", "standard deviation", "least", "most")
    heads = [f"word errors of {len(report['seeds'])} arrangements", *columns]
    lines = [heads, ["---"] * len(heads)]
    for strings in report["arrangements"]:
        each = (figures[f"{strings}, word errors, {column}"] for column in columns)
        lines.append([strings, *(f"{figure:.2f} %" for figure in each)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A recogniser's errors in many arrangements of its test set."
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with fsdd.tar.xz and fsdd_index.csv")
    parser.add_argument("--model", default=MODEL, help="a model's folder, or what comes with lintra")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    folder = checkpoint.newest(checkpoint.find(options.model))
    model = checkpoint.load(folder)
    found = {
        name(*joined): [error_rates(model, options.data, joined, seed) for seed in SEEDS] for joined in DIGITS
    }
    place = folder / RESULTS
    other = "" if options.model == MODEL else f" --model {options.model}"
    command = f"python experiments/speech/arrangements.py --data DIR{other}"
    more = {"seeds": list(SEEDS), "arrangements": found, "weights": checkpoint.digest(place.parent)}
    reports.write(place, rows(found), {}, command=command, **more)
    print(table(json.loads(place.read_text())))
    print(f"saved in {place}")


if __name__ == "__main__":
    main()

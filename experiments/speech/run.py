"""Speech recognition with CTC, six models: see README.md beside this file.

    python experiments/speech/run.py --data DIR          train what is not trained yet, then measure and draw
    python experiments/speech/run.py --data DIR --list   what there is to train and what is done

A run is a folder of `lintra train`; killed at any moment, the same command resumes it.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from lintra import checkpoint, evaluate, train
from lintra.allocator import keep_freed_memory
from lintra.bench import reports
from lintra.bench.reports import Row
from lintra.evaluate import ScoredUtterance
from lintra.speech import Search, transcription
from lintra.speech.corpus import prepare
from lintra.speech.ngram import NGram

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from setting import (  # noqa: E402 (from this folder)
    ASKED,
    BEST,
    COMMAND,
    CORPORA,
    MODELS,
    SPELLED,
    UNIT,
    WITH_NGRAMS,
    network,
    problem,
    task,
)
from shown import draw, tables  # noqa: E402
from timing import TIMES, measure  # noqa: E402
from trials import Trial, add_options, ranked, tell, train_and_keep  # noqa: E402 (from the folder above)

SEEDS = (0, 1, 2)
# Learning rates that are tried with the first seed; the other seeds are trained at the best in validation.
# Other models have the rate of their preset, which was not searched.
_MUON = (1.5e-3, 3e-3, 6e-3, 1.2e-2)
RATES = {
    ("an4", "Bi-LSTM"): (3e-4, 1e-3, 2e-3, 3e-3),
    ("an4", "softmax"): _MUON,
    ("an4", "linear"): _MUON,
    ("an4", "delta"): _MUON,
    ("an4", "alternating delta"): _MUON,
    ("fsdd", "Bi-LSTM"): (3e-4, 1e-3, 2e-3, 3e-3),
}
STEPS = {"an4": 4_000, "fsdd": 1_500}


def trial(corpus: str, model: str, seed: int, data: Path, lr: float | None = None) -> Trial:
    """A model to train, at its preset's learning rate unless another is given."""
    config = task(corpus, model, data)
    changed = {} if lr is None else {"lr": lr}
    preset = config.training_preset() | {"steps": STEPS[corpus], **changed}
    names = [model, *(f"{name} {x:g}" for name, x in changed.items()), f"seed {seed}"]
    return Trial(
        name=", ".join([CORPORA[corpus], *names]),
        folder=Path(HERE, "runs", corpus, *(name.replace(" ", "-") for name in names)),
        task=config,
        model=network(problem(config), model),
        training=train.Config(**{**preset, "precision": "32", "save_every": 100, "seed": seed}),
        score="symbol_errors",
        kept=HERE / "outcomes" / f"{'-'.join([CORPORA[corpus], *names])}.json".replace(" ", "-"),
    )


def searches(data: Path) -> list[Trial]:
    """The first seed of each model whose learning rate is searched, at all of its rates."""
    each = [(*who, lr) for who, rates in RATES.items() for lr in rates]
    return [trial(corpus, model, SEEDS[0], data, lr) for corpus, model, lr in each]


def searched(corpus: str, model: str, data: Path) -> dict[float, float | None]:
    """Learning rate -> the share of wrong symbols in validation after the last step, with the first seed;
    None if it diverged. Only rates that are trained; empty for a model whose rate is not searched."""
    done = {lr: trial(corpus, model, SEEDS[0], data, lr).concluded() for lr in RATES.get((corpus, model), ())}
    return {
        lr: None if outcome.get("diverged") else outcome["curve"][str(STEPS[corpus])]
        for lr, outcome in done.items()
        if outcome
    }


def seeds(corpus: str, model: str, data: Path) -> list[Trial]:
    """A model with each seed, at its preset's learning rate or, once all rates are searched, at the best of
    them; none if all of them diverged."""
    rates = searched(corpus, model, data)
    if len(rates) < len(RATES.get((corpus, model), ())):
        return []
    best = ranked(rates, lower_is_better=True)[:1] if rates else [None]
    return [trial(corpus, model, seed, data, lr) for lr in best for seed in SEEDS]


def trials(data: Path) -> list[Trial]:
    """Everything to train, as far as it is known, the first seed of all before the second of any."""
    each = [seeds(corpus, model, data) for corpus in CORPORA for model in MODELS]
    return [one for of in itertools.zip_longest(*each) for one in of if one is not None]


def with_language_model(one: Trial) -> Search:
    """A beam with n-grams of the transcripts to learn from. Its weights are guesses, not tuned."""
    samples = problem(one.task).train
    symbols = len(problem(one.task).symbols.names)
    lm = NGram.learn(samples.utterances.targets, order=6, symbols=symbols)
    return Search(beam=12, lm=lm, weight=0.6, bonus=0.5)


def written(one: Trial) -> dict[str, Any]:
    """Return what a trained model finds in the whole test set, and what was said."""
    model, task = checkpoint.load(one.folder), problem(one.task)
    corpus, _ = prepare(task.tested, model.config.features, cache=None)
    searches = {BEST: Search()}
    if task.config.data in SPELLED:
        searches[WITH_NGRAMS] = with_language_model(one)
    texts = {
        name: evaluate.transcripts(model, corpus, range(len(corpus)), search, batch=16)[0]
        for name, search in searches.items()
    }
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "said": [each.reference for each in texts[BEST]],
        "found": {name: [each.hypothesis for each in of] for name, of in texts.items()},
    }


def scores(data: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """corpus -> model -> the error rates of each seed and of all seeds together, and the curve of each."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for corpus, model in itertools.product(CORPORA, MODELS):
        kept = [one.concluded() for one in seeds(corpus, model, data)]
        done = [outcome for outcome in kept if outcome is not None and not outcome.get("diverged")]
        if not done:
            continue
        texts = [heard(outcome, BEST) for outcome in done]
        rates = [evaluate.error_rates(text, UNIT[corpus]) for text in texts]
        found.setdefault(corpus, {})[model] = {
            "parameters": done[0]["parameters"],
            "seeds": [{unit: dataclasses.asdict(rate) for unit, rate in of.items()} for of in rates],
            BEST: _of_all(texts, UNIT[corpus]),
            "curves": [outcome["curve"] for outcome in done],
            "diverged": sum(outcome is not None for outcome in kept) - len(done),
            "lr": done[0]["settings"]["train"]["lr"],
            "searched": {f"{lr:g}": errors for lr, errors in searched(corpus, model, data).items()},
        }
        if corpus in SPELLED:
            better = [heard(outcome, WITH_NGRAMS) for outcome in done]
            found[corpus][model][WITH_NGRAMS] = _of_all(better, UNIT[corpus])
    return found


def asked(found: dict[str, dict[str, dict[str, Any]]]) -> list[Row]:
    """List the targets for each model, though only the best transformer has to meet them."""
    rows = []
    for corpus, of in found.items():
        for kind, (model, scores) in itertools.product((BEST, WITH_NGRAMS), of.items()):
            if kind in scores:
                how = f" {kind}" if kind == WITH_NGRAMS else ""
                what = f"{CORPORA[corpus]}, {UNIT[corpus]} errors{how}: {model}"
                figure = 100 * scores[kind][UNIT[corpus]]["rate"]
                rows.append(Row(what, figure, "%", at_most=100 * ASKED[corpus]))
    return rows


def heard(outcome: dict[str, Any], search: str) -> list[ScoredUtterance]:
    """Return what was recognised in the test set, from an outcome, with one kind of search."""
    pairs = zip(outcome["said"], outcome["found"][search], strict=True)
    return [
        ScoredUtterance(id=str(i), reference=said, hypothesis=found) for i, (said, found) in enumerate(pairs)
    ]


def _of_all(texts: list[list[ScoredUtterance]], unit: str) -> dict[str, Any]:
    """The error rates of all seeds together."""
    rates = evaluate.error_rates(list(itertools.chain(*texts)), unit)
    return {kind: dataclasses.asdict(rate) for kind, rate in rates.items()}


def alignment(data: Path) -> dict[str, Any]:
    """A test utterance of digits, as the recogniser that comes with the library hears it: features, words and
    their times, and the probability of any symbol but the blank in each frame.
    """
    model = checkpoint.load(checkpoint.find("spoken-digits"))
    corpus, _ = prepare(problem(task("fsdd", "linear", data)).tested, model.config.features, cache=None)
    place = max(range(len(corpus)), key=corpus.frames)
    found = transcription.log_probs(model, [corpus.array(place)])[0]
    ids = Search()(found)
    words = transcription.words(model.config, found, ids, frames=corpus.frames(place))
    return {
        "said": corpus.texts[place],
        "shift": model.config.features.seconds,
        "words": [each._asdict() for each in words],
        "features": corpus.array(place).astype(float).round(2).tolist(),
        "symbol": (1 - found[:, 0].double().exp()).numpy().round(3).tolist(),
        "subsample": model.config.subsample,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech recognition with CTC, six models.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpora README.md names")
    add_options(parser, minutes=170.0)
    parser.add_argument("--times", action="store_true", help="measure times again: nothing else may run")
    options = parser.parse_args()
    if options.list:
        every = {one.name: one for one in (*searches(options.data), *trials(options.data))}
        tell(list(every.values()))
        return
    keep_freed_memory()
    parts = (lambda: searches(options.data), lambda: trials(options.data))
    train_and_keep(parts, COMMAND, written, workers=options.workers, minutes=options.minutes)
    if options.times or not TIMES.exists():
        reports.write(TIMES, *measure(options.data), command=COMMAND)
    found = scores(options.data)
    results = HERE / "results.json"
    reports.write(results, asked(found), {}, command=COMMAND, scores=found, alignment=alignment(options.data))
    report = json.loads(results.read_text())
    print("\n\n".join([*tables(report), f"saved in {results}"]))
    for file in draw(report):
        print(f"chart saved in {file}")


if __name__ == "__main__":
    main()

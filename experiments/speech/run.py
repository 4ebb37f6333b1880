"""Speech recognition with CTC, four models: see README.md beside this file.

    python experiments/speech/run.py --data DIR          train what is not trained yet, then measure and draw
    python experiments/speech/run.py --data DIR --list   what there is to train and what is done

A run is a folder of `lintra train`; killed at any moment, the same command goes on where it was.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lintra import checkpoint, evaluate, pictures, train, transcribe
from lintra.allocator import keep_freed_memory
from lintra.attention import linear, lsh, softmax
from lintra.bench import _report
from lintra.bench._memory import peak_of
from lintra.bench._report import Row, by_name
from lintra.bench._timing import interleaved
from lintra.evaluate import ErrorRate, Heard
from lintra.speech.corpus import prepare
from lintra.speech.ngram import NGram
from lintra.tasks import speech
from lintra.train._batches import LengthSampler
from lintra.transcribe import Search

HERE = Path(__file__).parent
TIMES = HERE / "times.json"
sys.path.insert(0, str(HERE.parent))
from trials import Trial, add_options, tell, train_and_keep, updates  # noqa: E402 (from the folder above)

CORPORA = {"an4": "AN4", "fsdd": "digit strings"}
UNIT = {"an4": "character", "fsdd": "word"}  # what is written, and whose error rate is asked for
ASKED = {"an4": 0.12, "fsdd": 0.05}  # the most of these errors
SPELLED = ("an4",)  # corpora whose transcripts say more than what was heard: n-grams of them help
MODELS = {
    "Bi-LSTM": linear.Config(),  # has no attention
    "softmax": softmax.Config(),
    "LSH-4": lsh.Config(rounds=4, chunk=32, redraw_every=None),
    "linear": linear.Config(),
}
SEEDS = (0, 1, 2)
STEPS = {"an4": 4_000, "fsdd": 1_500}
SAMPLED = 4  # batches of an epoch are timed, and stand for all
LENGTHS = (800, 1_600, 2_400, 4_800)  # frames of joined utterances
LONG = 4_800  # frames in a step of these, which every length divides
ROUNDS = 5
BEST, WITH_NGRAMS = "best path", "with 6-grams"  # how a text is searched
COMMAND = "python experiments/speech/run.py --data DIR"


def task(corpus: str, model: str, data: Path, **changes: Any) -> speech.Config:
    kind = "bilstm" if model == "Bi-LSTM" else "transformer"
    return speech.Config(data=corpus, data_dir=str(data), encoder=kind, units=UNIT[corpus], **changes)  # pyright: ignore[reportArgumentType]


@functools.cache
def problem(config: speech.Config) -> speech.Speech:
    """The task, its data read once."""
    return config.build()


def trial(corpus: str, model: str, seed: int, data: Path) -> Trial:
    config = task(corpus, model, data)
    preset = speech.training({"encoder": config.encoder}) | {"steps": STEPS[corpus]}
    return Trial(
        name=f"{CORPORA[corpus]}, {model}, seed {seed}",
        folder=HERE / "runs" / corpus / model / f"seed-{seed}",
        task=config,
        model=problem(config).model(MODELS[model]),
        training=train.Config(**{**preset, "precision": "32", "save_every": 100, "seed": seed}),
        score="symbol_errors",
        kept=HERE / "outcomes" / f"{CORPORA[corpus]}-{model}-seed-{seed}.json".replace(" ", "-"),
    )


def trials(data: Path) -> list[Trial]:
    """Everything there is to train, the first seed of all before the second of any."""
    order = itertools.product(SEEDS, CORPORA, MODELS)
    return [trial(corpus, model, seed, data) for seed, corpus, model in order]


def with_language_model(one: Trial) -> Search:
    """A beam with n-grams of the transcripts to learn from. Its weights are guesses, not tuned."""
    samples = problem(one.task).train
    symbols = len(problem(one.task).symbols.names)
    lm = NGram.learn(samples.heard.targets, order=6, symbols=symbols)
    return Search(beam=12, lm=lm, weight=0.6, bonus=0.5)


def written(one: Trial) -> dict[str, Any]:
    """What a trained model finds in the whole test set, beside what was said."""
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
        "said": [each.said for each in texts[BEST]],
        "found": {name: [each.found for each in of] for name, of in texts.items()},
    }


def scores(data: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """corpus -> model -> the error rates of each seed, of all seeds together, and the curve of each."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for corpus, model in itertools.product(CORPORA, MODELS):
        each = [trial(corpus, model, seed, data).concluded() for seed in SEEDS]
        done = [told for told in each if told is not None]
        if not done:
            continue
        texts = [heard(told, BEST) for told in done]
        rates = [evaluate.error_rates(text, UNIT[corpus]) for text in texts]
        found.setdefault(corpus, {})[model] = {
            "parameters": done[0]["parameters"],
            "seeds": [{unit: dataclasses.asdict(rate) for unit, rate in of.items()} for of in rates],
            BEST: _of_all(texts, UNIT[corpus]),
            "curves": [told["curve"] for told in done],
        }
        if corpus in SPELLED:
            better = [heard(told, WITH_NGRAMS) for told in done]
            found[corpus][model][WITH_NGRAMS] = _of_all(better, UNIT[corpus])
    return found


def heard(told: dict[str, Any], search: str) -> list[Heard]:
    """What an outcome says was heard of the test set, searched in one way."""
    pairs = zip(told["said"], told["found"][search], strict=True)
    return [Heard(id=str(i), said=said, found=found) for i, (said, found) in enumerate(pairs)]


def _of_all(texts: list[list[Heard]], unit: str) -> dict[str, Any]:
    """The error rates of all seeds together."""
    rates = evaluate.error_rates(list(itertools.chain(*texts)), unit)
    return {kind: dataclasses.asdict(rate) for kind, rate in rates.items()}


def epoch(corpus: str, model: str, data: Path) -> tuple[Callable[[], None], int]:
    """An update on each of some batches of an epoch, drawn evenly, and how many batches the epoch has."""
    one = problem(task(corpus, model, data))
    batches = LengthSampler(one.train.lengths, one.batch_tokens, seed=0).epoch(0)
    batches.sort(key=lambda places: sum(one.train.lengths[i] for i in places))
    chosen = [batches[(2 * i + 1) * len(batches) // (2 * SAMPLED)] for i in range(SAMPLED)]
    loaded = [one.train.__getitems__(places) for places in chosen]
    return updates(one, one.model(MODELS[model]), loaded), len(batches)


def long(model: str, length: int, data: Path) -> Callable[[], None]:
    """One update of the paper's model on utterances of AN4, joined to so many frames each, LONG in all."""
    one = problem(task("an4", model, data, preset="paper"))
    corpus, places = one.train.heard.corpus, iter(one.train.heard.places)
    rows, targets = [], []
    for _ in range(LONG // length):
        frames, said = np.zeros((0, corpus.features.shape[1]), np.float32), []
        while len(frames) < length:
            place = next(places)
            frames = np.concatenate((frames, corpus.array(place)))
            said += one.symbols.encode(corpus.texts[place]) if len(frames) <= length else []
        rows.append(torch.from_numpy(frames[:length]))
        targets.append(torch.tensor(said))
    batch = {
        "x": torch.stack(rows),
        "mask": torch.ones(len(rows), length, dtype=torch.bool),
        "targets": torch.nn.utils.rnn.pad_sequence(targets, batch_first=True),
    }
    return updates(one, one.model(MODELS[model]), [batch])


def measure(data: Path) -> tuple[list[Row], dict[str, Any]]:
    """Seconds an epoch of each corpus and against the length, interleaved over the models, and memory."""
    rows, timings = [], {}
    for corpus in CORPORA:
        found = {model: epoch(corpus, model, data) for model in MODELS}
        times = interleaved({model: step for model, (step, _) in found.items()}, rounds=ROUNDS, at_least=0)
        timings |= {f"{corpus} {model}": timing for model, timing in times.items()}
        for model, (_, batches) in found.items():
            seconds = times[model].median * batches / SAMPLED
            rows.append(Row(f"{CORPORA[corpus]}: {model}, an epoch", seconds, "s"))
    frames = sum(problem(task("an4", "linear", data)).train.lengths)
    for length in LENGTHS:
        times = interleaved({model: long(model, length, data) for model in MODELS}, rounds=2, at_least=0)
        timings |= {f"{length} {model}": timing for model, timing in times.items()}
        for model, timing in times.items():
            seconds = timing.median * frames / LONG
            rows.append(Row(f"{length} frames: {model}, an epoch", seconds, "s"))
        ratio = times["softmax"].median / times["linear"].median
        rows.append(Row(f"{length} frames: softmax / linear", ratio, "x", at_least=1.0))
    for model in MODELS:
        program = (
            f"import sys; sys.path.insert(0, {str(HERE)!r}); from pathlib import Path; import run\n"
            f"update = run.long({model!r}, 2400, Path({str(data)!r}))\n"
            "forget_peak()\nbefore = peak()\nupdate()\nprint(peak() - before)"
        )
        rows.append(Row(f"2400 frames: {model}, memory", peak_of(program) / 1e6, "MB"))
    return rows, timings


def times() -> dict[str, float]:
    """What the times were that were measured last, by their names; empty before that."""
    return by_name(json.loads(TIMES.read_text())) if TIMES.exists() else {}


def alignment(data: Path) -> dict[str, Any]:
    """A test utterance of digits, as the recogniser that comes with the library hears it: features,
    words and their times, and how probable any symbol but the blank is in each frame.
    """
    model = checkpoint.load(checkpoint.find("spoken-digits"))
    corpus, _ = prepare(problem(task("fsdd", "linear", data)).tested, model.config.features, cache=None)
    place = max(range(len(corpus)), key=corpus.frames)
    found = transcribe.log_probs(model, [corpus.array(place)])[0]
    ids = Search()(found)
    words = transcribe.words(model.config, found, ids, frames=corpus.frames(place))
    return {
        "said": corpus.texts[place],
        "shift": model.config.features.seconds,
        "words": [each._asdict() for each in words],
        "features": corpus.array(place).astype(float).round(2).tolist(),
        "symbol": (1 - found[:, 0].double().exp()).numpy().round(3).tolist(),
        "subsample": model.config.subsample,
    }


def draw(report: dict[str, Any]) -> list[Path]:
    """The pictures, from the file of results alone."""
    files = []
    for corpus, of in report["scores"].items():
        lines = {}
        for model, found in of.items():
            steps = [int(step) for step in found["curves"][0]]
            lines[model] = {s: 100 * statistics.mean(c[str(s)] for c in found["curves"]) for s in steps}
        files.append(HERE / f"{corpus}.png")
        title = f"{CORPORA[corpus]}, mean of {len(of['linear']['curves'])} seeds"
        pictures.curves(files[-1], lines, x="step", y=f"{UNIT[corpus]} errors in validation (%)", title=title)
    if rows := times():
        against = {m: {n: rows[f"{n} frames: {m}, an epoch"] for n in LENGTHS} for m in MODELS}
        files.append(HERE / "length.png")
        title = "The paper's models, an epoch of AN4 in joined utterances"
        pictures.logarithmic(
            files[-1], against, x="frames of an utterance", y="seconds an epoch", title=title
        )
    shown = report["alignment"]
    files.append(HERE / "alignment.png")
    pictures.alignment(
        files[-1],
        np.array(shown["features"]),
        [(word["text"], word["start"], word["end"]) for word in shown["words"]],
        np.array(shown["symbol"]),
        shift=shown["shift"],
        title=f"said: {shown['said']}",
    )
    return files


def tables(report: dict[str, Any]) -> list[str]:
    """Those of README.md: of each corpus, and against the length."""
    scores, rows = [table(report, corpus) for corpus in report["scores"]], times()
    return [*scores, against_length(rows)] if rows else scores


def table(report: dict[str, Any], corpus: str) -> str:
    """A row for each model trained on a corpus: its error rates, and what an epoch costs."""
    rows, kinds = times(), {BEST: f"{UNIT[corpus]} errors", WITH_NGRAMS: "with n-grams"}
    found = report["scores"][corpus]
    kinds = {kind: head for kind, head in kinds.items() if all(kind in of for of in found.values())}
    heads = ["model", "parameters", *kinds.values(), "each seed, %", *["seconds an epoch"] * bool(rows)]
    lines = [heads, ["---"] * len(heads)]
    for model, of in found.items():
        cells = [model, f"{of['parameters'] / 1e6:.2f} M"]
        for kind in kinds:
            rate = ErrorRate(**of[kind][UNIT[corpus]])
            cells.append(f"{100 * rate.rate:.1f} % ({100 * rate.low:.1f} to {100 * rate.high:.1f})")
        cells.append(", ".join(f"{100 * seed[UNIT[corpus]]['rate']:.1f}" for seed in of["seeds"]))
        if rows:
            cells.append(f"{rows[f'{CORPORA[corpus]}: {model}, an epoch']:.1f}")
        lines.append(cells)
    return _markdown(lines)


def against_length(rows: dict[str, float]) -> str:
    """A row for each model: seconds an epoch by the frames of an utterance, beside softmax, and memory."""
    heads = ["model", *(f"{n:,} frames" for n in LENGTHS), "MB of 2,400 frames"]
    lines = [heads, ["---"] * len(heads)]
    for model in MODELS:
        times = [rows[f"{n} frames: {model}, an epoch"] for n in LENGTHS]
        least = [rows[f"{n} frames: softmax, an epoch"] for n in LENGTHS]
        cells = [f"{x:,.0f} s ({y / x:.1f} x)" for x, y in zip(times, least, strict=True)]
        lines.append([model, *cells, f"{rows[f'2400 frames: {model}, memory']:,.0f}"])
    return _markdown(lines)


def _markdown(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech recognition with CTC, four models.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpora README.md names")
    add_options(parser, minutes=170.0)
    parser.add_argument("--no-times", action="store_true", help="leave the times that are there")
    options = parser.parse_args()
    every = trials(options.data)
    if options.list:
        tell(every)
        return
    keep_freed_memory()
    train_and_keep(every, COMMAND, written, workers=options.workers, minutes=options.minutes)
    if not options.no_times:
        _report.write(TIMES, *measure(options.data), command=COMMAND)
    found, rows = scores(options.data), []
    for corpus, of in found.items():
        rates = [x[BEST][UNIT[corpus]]["rate"] for model, x in of.items() if model != "Bi-LSTM"]
        what = f"{CORPORA[corpus]}, {UNIT[corpus]} errors, best transformer"
        rows.append(Row(what, 100 * min(rates, default=1.0), "%", at_most=100 * ASKED[corpus]))
    results = HERE / "results.json"
    _report.write(results, rows, {}, command=COMMAND, scores=found, alignment=alignment(options.data))
    report = json.loads(results.read_text())
    print("\n\n".join([*tables(report), f"saved in {results}"]))
    for file in draw(report):
        print(f"drawn in {file}")


if __name__ == "__main__":
    main()

"""`lintra evaluate` for a recogniser of speech."""

import dataclasses
import sys
from typing import Any, cast

from lintra import evaluate as scoring
from lintra.audio import features
from lintra.cli.arguments import UsageError
from lintra.cli.evaluation import Evaluation
from lintra.cli.model import Opened, refuse_changed_data, sampled
from lintra.cli.progress import progress
from lintra.cli.stopping import cut_short, stopping
from lintra.evaluate import ErrorRate, hypotheses
from lintra.io import files
from lintra.models import CTC
from lintra.speech.corpus import Corpus, Skipped, describe_skipped, prepare
from lintra.tasks.speech import Speech


def evaluate(opened: Opened, options: Any) -> int:
    """Print error rates on the task's test set, by `lintra.cli.evaluate.Options`. Return the exit code, 1
    where utterances were skipped."""
    model: CTC = opened.model
    task = cast(Speech, opened.task)
    if options.pictures:
        raise UsageError(f"pictures is for models of images, {options.model} is of the task speech")
    if options.predictions:
        raise UsageError("predictions are for texts: hypotheses are those of speech")
    for path in options.hypotheses:
        for file in hypotheses.written(path):
            files.refuse_unwritable(file)
    refuse_changed_data(opened)
    config, search = model.config, options.decoding.search(model)
    corpus, skipped = _corpus(config.features, task, options)
    evaluation, quiet = Evaluation(opened, options, len(task.tested)), options.output.quiet
    with progress("hearing", len(corpus), "utterances", quiet=quiet) as report, stopping("batch") as stop:
        scored, without = scoring.transcripts(
            model,
            corpus,
            range(len(corpus)),
            search,
            batch=options.batch,
            timestamps=any(map(hypotheses.needs_times, options.hypotheses)),
            report=report,
            stopped=stop,
        )
    partial = len(scored) + len(without) < len(corpus)
    skipped = [*skipped, *without]
    if not scored:
        raise UsageError(f"none of {len(skipped):,} utterances can be scored: {describe_skipped(skipped)}")
    rates = scoring.error_rates(scored, config.symbols.unit)
    evaluation.finish(len(scored), "utterances")
    print("\n".join(f"  {name:<9} errors  {_format(rate)}" for name, rate in rates.items()))
    if partial:
        print(f"\n{cut_short(f'the {len(scored):,} shortest of {len(corpus):,} utterances')}")
    if skipped:
        print(f"\n{describe_skipped(skipped, options.json)}")
    evaluation.save(
        {name: dataclasses.asdict(rate) for name, rate in rates.items()},
        partial,
        search=options.decoding.as_json(search),
        skipped=[each._asdict() for each in skipped],
    )
    for path in options.hypotheses:
        hypotheses.write(path, scored, task.tested, config.symbols.unit)
    if options.hypotheses:
        made = [str(file) for path in options.hypotheses for file in hypotheses.written(path)]
        print(f"\nhypotheses saved in {', '.join(made)}")
    if options.json is None:
        for each in skipped:
            print(f"lintra: {each.id}: {each.reason}", file=sys.stderr)
    if partial:
        return stop.exit_code
    return 1 if skipped else 0


def _corpus(config: features.Config, task: Speech, options: Any) -> tuple[Corpus, list[Skipped]]:
    """Return the features of the chosen test samples. If the folder in which the run keeps features exists,
    those of the whole set are read from it, and kept there if it is writable.
    """
    chosen = [task.tested[i] for i in sampled(len(task.tested), options.limit, options.seed)]
    cache = task.cached(task.judged_by) if options.limit is None else None
    if cache is not None and not cache.parent.is_dir():
        cache = None
    with progress("features to test on", len(chosen), "utterances", quiet=options.output.quiet) as report:
        try:
            return prepare(chosen, config, cache=cache, report=report)
        except files.Error:
            return prepare(chosen, config, cache=None, report=report)


def _format(x: ErrorRate) -> str:
    """An error rate, its interval and what it is made of."""
    return (
        f"{x.rate:6.2%} (95 %: {x.low:.2%} to {x.high:.2%})   {x.substitutions:,} substitutions, "
        f"{x.insertions:,} insertions, {x.deletions:,} deletions in {x.length:,}"
    )

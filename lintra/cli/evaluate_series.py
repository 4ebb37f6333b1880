"""`lintra evaluate` for a forecaster of series."""

import math
from typing import Any, cast

from lintra.cli.arguments import UsageError
from lintra.cli.evaluation import Evaluation
from lintra.cli.model import Opened, sampled
from lintra.cli.progress import progress
from lintra.cli.stopping import cut_short, stopping
from lintra.evaluate import Estimate
from lintra.evaluate.forecasts import PATHS, ForecastScores, forecast_scores
from lintra.generation import check_recurrent
from lintra.models import Forecaster
from lintra.tasks.series import SeriesTask

_HEADINGS: tuple[str, ...] = ("", "quantile loss", "MASE", "within 80 %")


def evaluate(opened: Opened, options: Any) -> int:
    """Score forecasts of the task's test windows, by `lintra.cli.evaluate.Options` -> the exit code."""
    model: Forecaster = opened.model
    task = cast(SeriesTask, opened.task)
    if options.pictures:
        raise UsageError(f"pictures is for models of images, {options.model} is of the task series")
    check_recurrent(model)
    windows = sampled(len(task.test), options.limit, options.seed)
    evaluation, quiet = Evaluation(opened, options, len(task.test)), options.output.quiet
    with progress("forecasting", len(windows), "windows", quiet=quiet) as report, stopping("batch") as stop:
        settings = {"batch": options.batch, "seed": options.seed}
        scores = forecast_scores(model, task, windows, **settings, report=report, stopped=stop)
    scored = scores["model"].coverage.samples
    season = "no season" if task.season == 1 else f"a season of {task.season:,} rows"
    evaluation.finish(scored, "windows", f"each {task.config.horizon:,} rows ahead", f"{PATHS} paths", season)
    print(table(scores))
    print(f"\n{verdict(scores)}")
    if partial := scored < len(windows):
        print(f"\n{cut_short(f'the first {scored:,} of {len(windows):,} windows')}")
    of_each = {
        name: {what: x and x.as_json() for what, x in each._asdict().items()} for name, each in scores.items()
    }
    evaluation.save(of_each, partial, paths=PATHS)
    return stop.exit_code if partial else 0


def table(scores: dict[str, ForecastScores]) -> str:
    """Return a line of scores for each way to forecast, under a heading."""
    rows = [list(_HEADINGS)]
    for name, each in scores.items():
        rows.append([name, *figures(each)])
    wide = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return "\n".join(
        "  " + "  ".join(f"{x:<{n}}" for x, n in zip(row, wide, strict=True)).rstrip() for row in rows
    )


def figures(scores: ForecastScores) -> tuple[str, str, str]:
    """Return the scores of one way to forecast with their errors, in words."""
    return (
        _figure(scores.weighted_quantile_loss),
        _figure(scores.mase),
        _figure(scores.coverage, percent=True),
    )


def _figure(x: Estimate | None, percent: bool = False) -> str:
    if x is None:
        return "-"
    if percent:
        return f"{x.mean:.1%}" + ("" if math.isnan(x.error) else f" +- {x.error:.1%}")
    return f"{x.mean:.4f}" + ("" if math.isnan(x.error) else f" +- {x.error:.4f}")


def verdict(scores: dict[str, ForecastScores]) -> str:
    """Say by how much the quantile loss is below that of the best forecast without a model, or that it is
    not."""
    losses = {name: x.weighted_quantile_loss for name, x in scores.items()}
    own = losses.pop("model")
    others = {name: x.mean for name, x in losses.items() if x is not None}
    if own is None or not others:
        return "All values are 0: there is nothing to compare"
    best = min(others, key=others.__getitem__)
    if own.mean >= others[best]:
        return f"The model does not beat the {best} forecast, by quantile loss"
    return f"The quantile loss is {1 - own.mean / others[best]:.0%} below that of the {best} forecast"

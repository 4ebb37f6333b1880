"""Run the comparison: train what is not trained yet, and draw its tables and pictures.

    python -m experiments.compare --data DIR             the small preset
    python -m experiments.compare --problem parity       one problem of it
    python -m experiments.compare --list                 what is done and what is not
    python -m experiments.compare --tables               write and draw what the outcomes say

Killed at any moment, the same command resumes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.compare import contestants, tables
from experiments.compare.problems import COMPARISON, Study
from experiments.compare.search import Attempt, Contest
from experiments.trials import add_options, train_ready
from lintra.allocator import keep_freed_memory


class Queue:
    """The trainings that can begin, contest by contest. A contest that is done is not looked at again."""

    def __init__(self, contests: Sequence[Contest]):
        self.contests = list(contests)

    def __call__(self) -> Iterator[Attempt]:
        for contest in tuple(self.contests):
            if ready := contest.ready():
                yield from ready
            else:
                self.contests.remove(contest)


def contests_of(study: Study, options: argparse.Namespace) -> list[Contest]:
    """Everything that was asked for, problem by problem. Ends the program if data are missing or differ."""
    chosen = study.of_preset(options.preset, options.problem)
    if not options.list:
        for problem in chosen:
            problem.check(options.data)
    who = [contestants.BY_NAME[name] for name in options.attention or contestants.BY_NAME]
    for name in options.attention or ():
        obstacles = {problem.name: contestants.BY_NAME[name].obstacle(problem) for problem in chosen}
        if all(obstacles.values()):
            where, why = ", ".join(obstacles), " and ".join(dict.fromkeys(map(str, obstacles.values())))
            sys.exit(f"{name} takes no part in {where}: it {why}")
    data = None if options.list else options.data
    return [
        Contest(problem, contestant, options.preset, data, study)
        for problem in chosen
        for contestant in who
        if contestant.obstacle(problem) is None
    ]


def say(contests: Sequence[Contest], *, each: bool) -> None:
    """Print how many contests are done and, if `each`, which ones."""
    missing = [contest for contest in contests if contest.ready()]
    for contest in contests if each else ():
        state = "to do" if contest in missing else "done "
        print(f"{state} {contest.problem.name}, {contest.contestant.name}")
    ending = "; the same command resumes" if missing else ""
    print(f"{len(contests) - len(missing)} of {len(contests)} searches are done{ending}")


def main(arguments: Sequence[str] | None = None, study: Study = COMPARISON) -> None:
    parser = argparse.ArgumentParser(
        prog=study.command, description="Every mechanism at its own learning rate."
    )
    parser.add_argument("--preset", choices=tuple(study.presets), default="small", help="steps, and problems")
    parser.add_argument(
        "--problem", "--task", nargs="+", choices=tuple(study.by_name), metavar="P", help="these only"
    )
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=tuple(contestants.BY_NAME),
        metavar="A",
        help="these contestants only",
    )
    parser.add_argument("--data", type=Path, help="folder with the texts that README.md names")
    add_options(parser, minutes=240.0)
    parser.add_argument("--tables", action="store_true", help="write and draw what the outcomes say")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < 1e6:
        parser.error(f"--minutes must be above 0 and below 1,000,000, got {options.minutes:g}")
    if options.tables:
        print(tables.write(study))
        return
    contests = contests_of(study, options)
    if options.list:
        say(contests, each=True)
        return
    keep_freed_memory()
    train_ready(Queue(contests), workers=options.workers, minutes=options.minutes)
    say(contests, each=False)


if __name__ == "__main__":
    sys.exit(main())

"""Run the Long Range Arena: train what is not trained yet, and draw its tables and pictures.

    python -m experiments.lra --task listops                      every mechanism, the small preset
    python -m experiments.lra --task text --data DIR              on the reviews of IMDB, which are in DIR
    python -m experiments.lra --task listops --attention linear --preset paper
    python -m experiments.lra --list                              what is done and what is not
    python -m experiments.lra --tables                            write and draw what the outcomes say

Killed at any moment, the same command resumes. It is experiments/compare on other problems.
"""

import sys
from collections.abc import Sequence

from experiments.compare.__main__ import main as compare
from experiments.lra.problems import ARENA


def main(arguments: Sequence[str] | None = None) -> None:
    compare(arguments, ARENA)


if __name__ == "__main__":
    sys.exit(main())

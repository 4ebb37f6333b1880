"""Flags, shared by commands, for how much they print."""

import dataclasses

from lintra.train.config import Verbosity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet:
    """Flag of commands that show how far they are."""

    quiet: bool = False  # print errors and the result only

    @property
    def verbosity(self) -> Verbosity:
        """Amount to print while a model is trained."""
        return "result" if self.quiet else "progress"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Quiet):
    """Flags of commands that also say what they choose."""

    verbose: bool = False  # also print choices: sizes, schedule, kernels

    def __post_init__(self):
        if self.quiet and self.verbose:
            raise ValueError("quiet and verbose are opposites: choose one")

    @property
    def verbosity(self) -> Verbosity:
        return "all" if self.verbose else super().verbosity

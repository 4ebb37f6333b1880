"""Report of a check: each law passed, failed or not applicable, with the smallest input that breaks it."""

import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["passed", "failed", "not applicable"]
_RANK: dict[Outcome, int] = {"not applicable": 0, "passed": 1, "failed": 2}


@dataclass(frozen=True)
class Finding:
    """One law applied in one mode. Of a failure, `sizes` and `seed` are the smallest input that shows it."""

    law: str
    meaning: str  # of the law, in one line
    mode: str  # causal, bidirectional, causal-rotary, bidirectional-rotary
    outcome: Outcome
    sizes: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    message: str = ""

    def __str__(self) -> str:
        if self.outcome != "failed":
            return f"{self.law} [{self.mode}]: {self.outcome}"
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        shown = "\n".join(f"    {line}" for line in self.message.splitlines()[:6] if line.strip())
        return (
            f"{self.law} [{self.mode}]: failed\n    {self.meaning}\n"
            f"    smallest input: {sizes}, seed {self.seed}\n{shown}"
        )


@dataclass(frozen=True)
class Report:
    """The findings of all laws about one attention.

    A law passes if it does in every mode that it applies to."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The outcome of each law over all modes, in the order they were applied."""
        found: dict[str, Outcome] = {}
        for each in self.findings:
            found[each.law] = max(found.get(each.law, each.outcome), each.outcome, key=_RANK.__getitem__)
        return found

    @property
    def passed(self) -> list[str]:
        """Names of the laws that hold."""
        return self._of("passed")

    @property
    def failed(self) -> list[str]:
        """Names of the laws that are broken."""
        return self._of("failed")

    @property
    def not_applicable(self) -> list[str]:
        """Names of the laws that do not apply to this attention."""
        return self._of("not applicable")

    @property
    def failures(self) -> tuple[Finding, ...]:
        """One finding for each law and mode that is broken."""
        return tuple(each for each in self.findings if each.outcome == "failed")

    @property
    def ok(self) -> bool:
        """Return whether a law applies and none is broken."""
        return bool(self.passed) and not self.failed

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the text of the report unless it is `ok`."""
        if not self.ok:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, object]:
        """Return the counts and findings, as JSON takes them."""
        return {
            "subject": self.subject,
            "passed": len(self.passed),
            "applicable": len(self.passed) + len(self.failed),
            "outcomes": self.outcomes,
            "failures": [asdict(each) for each in self.failures],
        }

    def _of(self, outcome: Outcome) -> list[str]:
        return [law for law, each in self.outcomes.items() if each == outcome]

    def __str__(self) -> str:
        applicable = len(self.passed) + len(self.failed)
        lines = [f"{self.subject}: {len(self.passed)} of {applicable} applicable laws passed"]
        lines += [str(each) for each in self.failures]
        if self.not_applicable:
            lines.append(f"not applicable: {', '.join(self.not_applicable)}")
        return "\n".join(lines)


def meaning(law: object) -> str:
    """Return the first sentence of a law's docstring, in one line."""
    text = " ".join((getattr(law, "__doc__", None) or "").split())
    return text.split(". ")[0].rstrip(".") + "."


def message(error: Exception) -> str:
    """Return what an exception says, or the line of code where it has no message, as a bare assertion
    does."""
    if str(error):
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return kind + str(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(__file__).parent in Path(frame.filename).parents]
    last = (ours or frames)[-1]
    return last.line or type(error).__name__

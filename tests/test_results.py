"""The age of committed results: a document says at which commit each figure was measured."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The number of commits to the measured files after which the page must state the age of a measurement.
AGE = 20
OLDER = "older than the current code"
WITHOUT = "before reports named their commit"
# The current place of code whose path a report names but that has since moved.
MOVED = {
    "lintra/fused.py": "lintra/generation/native_decode.py",
    "lintra/ops/linear_attention.py": "lintra/ops/linear_attention",
    "lintra/ops/piece.py": "lintra/ops/sequence_shard.py",
}
PAGES = [
    *(ROOT / name for name in ("README.md",)),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "experiments").glob("*/README.md"),
]


def shown() -> list[tuple[Path, Path]]:
    """(page, report) for every dated report that a page links to."""
    found = []
    for page in PAGES:
        for target in dict.fromkeys(re.findall(r"\]\(([^)#]+\.json)\)", page.read_text())):
            file = (page.parent / target).resolve()
            if "date" in json.loads(file.read_text()):
                found.append((page, file))
    return found


def git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def age(commit: str, paths: list[str]) -> int:
    """The number of commits since this one that touch these files, under their old and their new names.

    Raises CalledProcessError if the commit is unknown, KeyError for a missing path without an explanation."""
    git("merge-base", "--is-ancestor", commit, "HEAD")
    paths = paths + [MOVED[path] for path in paths if not (ROOT / path).exists()]
    return int(git("rev-list", "--count", f"{commit}..HEAD", "--", *paths))


def complaint(page: str, report: dict, commits: int) -> str | None:
    """What a page that shows a report fails to say, of its age beside the commit; None if nothing."""
    commit = report.get("commit")
    paragraphs = [" ".join(each.split()) for each in page.split("\n\n")]
    if commit is None:
        return (
            None
            if any(WITHOUT in each for each in paragraphs)
            else f"no commit in the file, and the page does not say {WITHOUT!r}"
        )
    if commit.endswith("+"):
        return f"measured with changes that were not committed ({commit})"
    if commit[:7] not in page:
        return f"the page does not name the commit {commit[:7]}"
    if commits > AGE and not any(commit[:7] in each and OLDER in each for each in paragraphs):
        return f"{commits} commits have touched what it measures: measure again, or say {OLDER!r}"
    return None


def test_what_a_page_has_to_say():
    new = {"commit": "0123456789"}
    assert complaint("at 0123456", new, AGE) is None
    assert "21 commits" in complaint("at 0123456", new, AGE + 1)
    assert complaint(f"at 0123456, {OLDER}", new, AGE + 1) is None
    assert "21 commits" in complaint(f"at 0123456\n\nOthers are {OLDER}", new, AGE + 1)
    assert "does not name" in complaint("", new, 0)
    assert "not committed" in complaint("at 0123456", {"commit": "0123456789+"}, 0)
    assert "no commit" in complaint("", {}, 0)
    assert complaint(WITHOUT, {}, 0) is None


def whole_history() -> bool:
    """Whether commits can be counted here: only in a git checkout that is not shallow."""
    return (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == "false"


@pytest.mark.skipif(not whole_history(), reason="no git checkout with its whole history to count in")
@pytest.mark.parametrize(("page", "file"), shown(), ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_not_older_than_a_page_says(page, file):
    report = json.loads(file.read_text())
    commit = report.get("commit") or ""
    commits = age(commit, report.get("measures", [])) if commit and "measures" in report else 0
    told = complaint(page.read_text(), report, commits)
    assert told is None, f"{file.relative_to(ROOT)}: {told}"


def missed() -> str:
    """A row for every missed target in a report that some page shows."""
    lines = ["| report | work | measured | target |", "| --- | --- | --- | --- |"]
    for file in sorted({file for _, file in shown()}):
        for row in json.loads(file.read_text()).get("rows", []):
            if row.get("met") is False:
                x = row["figure"]
                figure = f"{f'{x:,.0f}' if x >= 1_000 else f'{x:.4g}'} {row['unit']}".strip()
                lines.append(f"| `{file.relative_to(ROOT)}` | {row['what']} | {figure} | {row['target']} |")
    return "\n".join(lines)


def test_every_missed_target_is_listed():
    assert missed() in (ROOT / "docs" / "performance" / "targets.md").read_text()

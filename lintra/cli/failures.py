"""One line of standard error for a file or text that failed, while the others are processed."""

import sys


def report_failure(where: object, error: Exception) -> None:
    """Print what failed and why, in one line. A reason that names it already is printed alone."""
    reason = " ".join(str(error).split())
    print(f"lintra: {reason if str(where) in reason else f'{where}: {reason}'}", file=sys.stderr)

"""Results as JSON, one object per line."""

import json
import sys
from typing import Any


def print_json(content: dict[str, Any]) -> None:
    """Print an object as a line of its own, at once. Characters that the output's encoding lacks, such as
    those for bytes of a file name that are not text, are written as JSON's escapes."""
    line = json.dumps(content, ensure_ascii=False)
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(content)
    print(line, flush=True)

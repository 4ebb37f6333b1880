"""Results as JSON, an object a line."""

import json
from typing import Any


def say(content: dict[str, Any]) -> None:
    """Print an object as a line of its own, at once."""
    print(json.dumps(content, ensure_ascii=False), flush=True)

"""`lintra train TASK --config FILE`: the settings of a run, read back as the defaults of another one."""

import re
from pathlib import Path
from typing import Any

from lintra import legacy, models
from lintra.checkpoint import check_format, from_json
from lintra.cli.arguments import UsageError
from lintra.config import registry
from lintra.config.fields import shown
from lintra.io.files import read_json

_PARTS = ("task", "model", "train")
# A run writes them too, and another one has its own.
_OF_ONE_RUN = ("format", "data", "fitted_steps", "copies", "job")
_POWERS_OF_TEN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")  # numbers in YAML 1.2 and JSON


def read(file: Path) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return the parts "task", "model" and "train" of a run.json, or of YAML of the same form, as far as it
    has them, and whether a run wrote them.

    Raises UsageError, which names the key, for one that no run has; Error for a damaged file.
    """
    if not file.is_file():
        raise UsageError(f"config {file} is not a file")
    content = _yaml(file) if file.suffix in (".yaml", ".yml") else read_json(file)
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds no settings: it is not an object")
    if unknown := [key for key in content if key not in _PARTS + _OF_ONE_RUN]:
        known = ", ".join(_PARTS)
        raise UsageError(f"{file} has the unknown key {shown(unknown[0])}; settings are in {known}")
    if "format" in content:
        check_format(content["format"], file)
        content = legacy.upgrade_run(content) if content["format"] == legacy.FORMAT else content
    parts = {name: content[name] for name in _PARTS if name in content}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise UsageError(f"{file}: {name} must be an object, got {shown(part)}")
    return parts, "format" in content


def model(content: dict[str, Any], *, saved: bool) -> Any:
    """Return the configuration of the network in the part "model", which a run has written if `saved`.

    Raises ValueError."""
    kind = registry.load(models, content.get("name", ""), "model").Config
    return from_json(kind, content, "model", saved=saved)


def _yaml(file: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Read 1e-3 as a number, which PyYAML takes for text."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _POWERS_OF_TEN, list("-+.0123456789"))
    try:
        return yaml.load(file.read_text(encoding="utf-8-sig"), Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error

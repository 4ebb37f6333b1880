"""Problems to train on. One file, one task: the folder is the registry."""

import sys
from types import ModuleType

from lintra.config import registry
from lintra.tasks._pixels import PixelTask, check_fraction
from lintra.tasks.base import (
    Batch,
    DataError,
    Report,
    Samples,
    Task,
    TaskConfig,
    Watch,
    predict,
    predicted,
    read,
)

__all__ = [
    "Batch",
    "DataError",
    "PixelTask",
    "Report",
    "Samples",
    "Task",
    "TaskConfig",
    "Watch",
    "check_fraction",
    "load",
    "names",
    "predict",
    "predicted",
    "read",
]


def names() -> list[str]:
    """Return the names of all tasks, in alphabetical order."""
    return registry.names(sys.modules[__name__])


def load(name: str) -> ModuleType:
    """Return the task's module, with its `Config` and its class. A name may be written with - or _.

    Raises ValueError for an unknown name.
    """
    key = name.replace("-", "_") if isinstance(name, str) else name
    return registry.load(sys.modules[__name__], key, "task")

"""Transformers with linear attention: train in parallel, generate as an RNN from the same weights.

attention: the mechanisms. ops: the sums they are made of. nn: what surrounds them. models: whole networks.
generate, beam: text, images, sequences from a model. checkpoint: models on disk. Imported when they are first
asked for: tasks, train, evaluate (with lintra[train]); speech, transcribe (with lintra[speech]); export and
runtime, a model without Python; allocator, fused, replay: what speed depends on.
"""

from importlib import import_module
from types import ModuleType

from lintra import attention, beam, checkpoint, generate, models, nn, ops

__version__ = "0.1.0"

__all__ = ["attention", "beam", "checkpoint", "generate", "models", "nn", "ops"]

_LATER = (
    "allocator",
    "evaluate",
    "export",
    "fused",
    "replay",
    "runtime",
    "speech",
    "tasks",
    "train",
    "transcribe",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")

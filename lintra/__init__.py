"""Transformers with linear attention: train in parallel, generate as an RNN from the same weights.

attention: the mechanisms. ops: the sums they are made of. nn: what surrounds them. models: whole networks.
generation: text, images, sequences from a model. checkpoint: models on disk. accelerate: models of
transformers, FLA and mamba_ssm on lintra's CPU kernels. Imported when they are first asked for: tasks, train,
evaluate (with lintra[train]); audio, speech (with lintra[speech]); hf, Hugging Face's classes (with
lintra[hf]); distributed, a sequence over several processes; export and runtime, a model without Python;
allocator, what speed depends on.
"""

from importlib import import_module
from types import ModuleType

from lintra import attention, checkpoint, generation, models, nn, ops
from lintra.compat import accelerate

__version__ = "0.2.0"

__all__ = ["accelerate", "attention", "checkpoint", "generation", "models", "nn", "ops"]

_LATER = ("allocator", "audio", "distributed", "evaluate", "export", "hf", "runtime", "speech")
_LATER += ("tasks", "tokenizer", "train")
_OLD = ("beam", "generate", "transcribe")  # modules of 0.1, which say where their content is


def __getattr__(name: str) -> ModuleType:
    if name not in (*_LATER, *_OLD):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")

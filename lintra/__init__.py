"""Transformers with linear attention: train in parallel, generate as an RNN from the same weights.

attention: the mechanisms. ops: the sums they are made of. nn: what surrounds them. models: whole networks.
generate, beam: text, images, sequences from a model. checkpoint: models on disk. tasks, train: with
lintra[train].
"""

from lintra import attention, beam, checkpoint, generate, models, nn, ops

__version__ = "0.1.0"

__all__ = ["attention", "beam", "checkpoint", "generate", "models", "nn", "ops"]

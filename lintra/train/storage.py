"""Lightning's checkpoints as safetensors and JSON: nothing is pickled.

A checkpoint is the folder step-00001200 of a run: config.json and model.safetensors as lintra.checkpoint
writes them, and what is needed to resume as training.json (the tree) and training.safetensors (its tensors).
Large files come in parts: see lintra.io.tensors. Processes that shard a model write its shards in their
place (`lintra.train.sharded_storage`); both forms are read by any number of processes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import CheckpointIO
from torch import Tensor

from lintra import legacy
from lintra.checkpoint import FORMAT, WEIGHTS, check_format, with_weights, write_model
from lintra.io.files import Error, read_json, write_atomically
from lintra.io.shards import read_whole
from lintra.io.tensors import write_tensors
from lintra.train.tree_json import flatten, unflatten

TREE, TENSORS = "training.json", "training.safetensors"
# What Lightning requires of a checkpoint, and its version, by which it migrates an older one.
_KEYS = {
    "pytorch-lightning_version": str,
    "epoch": int,
    "global_step": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
PREFIX = "model."  # of the model's weights among the learner's


class Storage(CheckpointIO):
    """Write each checkpoint whole or not at all. Raises checkpoint.Error; the one before survives."""

    def __init__(self, model: Any):
        self.model = model

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        weights, tree, tensors = taken_apart(checkpoint)

        def write(folder: Path) -> None:
            cpu = {name: tensor.cpu() for name, tensor in weights.items()}
            write_model(with_weights(self.model, cpu, folder), folder)
            (folder / TREE).write_text(tree)
            write_tensors({name: tensor.cpu() for name, tensor in tensors.items()}, folder / TENSORS)

        write_atomically(Path(path), write)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(path)
        tree, old = read_tree(folder)
        weights = read_whole(folder, "model")
        weights = legacy.upgrade_tensors(weights) if old else weights
        with_weights(self.model, weights, folder / WEIGHTS)  # Error where they are not of the run's model
        checkpoint = put_together(folder, tree, _copied(read_whole(folder, "training")), old)
        return checkpoint | {"state_dict": {PREFIX + name: x for name, x in weights.items()}}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors mapped from a file that will be removed while the optimiser uses them."""
    return {name: x.clone() for name, x in tensors.items()}


def taken_apart(checkpoint: dict[str, Any]) -> tuple[dict[str, Tensor], str, dict[str, Tensor]]:
    """Return the model's weights, the text of training.json, and the tensors that belong to it."""
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
    tree, tensors = flatten({name: value for name, value in checkpoint.items() if name != "state_dict"})
    return weights, json.dumps({"format": FORMAT, "checkpoint": tree}, allow_nan=False), tensors


def read_tree(folder: Path) -> tuple[Any, bool]:
    """Return what training.json holds, and whether it is of lintra 0.1. Raises Error."""
    content = read_json(folder / TREE)
    if not isinstance(content, dict):
        raise Error(f"{folder / TREE} is not a training state")
    check_format(content.get("format"), folder / TREE)
    return content.get("checkpoint"), content["format"] == legacy.FORMAT


def put_together(folder: Path, tree: Any, tensors: dict[str, Tensor], old: bool) -> dict[str, Any]:
    """Return what Lightning resumes from, without the weights. Raises Error where tree and tensors do not
    belong together or something is missing."""
    try:
        checkpoint = unflatten(tree, tensors)
    except (ValueError, TypeError) as error:
        raise Error(f"{folder / TREE} is damaged: {error}") from error
    checkpoint = legacy.upgrade_training(checkpoint) if old else checkpoint
    for name, kind in _KEYS.items():
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), kind):
            raise Error(f"{folder / TREE} is damaged: its {name} is missing or no {kind.__name__}")
    return checkpoint

"""Checkpoints of a model that several processes share: each writes its part, beside training.

What is written is the folder that `lintra.train.storage` describes, with shards (`lintra.io.shards`) in place
of model.safetensors and training.safetensors. Every process reads its own part of either form.
"""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor, distribute_tensor

from lintra.checkpoint import CONFIG, describe_model, with_weights
from lintra.io.files import Error, publish
from lintra.io.shards import SHARDS, describe, index, read_into, reason
from lintra.train.storage import PREFIX, TREE, Storage, put_together, read_tree, taken_apart


class ShardedStorage:
    """Write and read checkpoints with all processes of `group`, a gloo group used for nothing else.

    storage: of the one-file form, from which the model's configuration is taken. One checkpoint is written at
    a time.
    """

    def __init__(self, storage: Storage, group: Any):
        self.storage, self.group = storage, group
        self._writing: tuple[Path, Future[Any]] | None = None

    def begin(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Copy the tensors to save and write them while training continues.

        The folder is published by the first process when all have written their shards: a killed run
        leaves a hidden folder, which `Run.sweep` removes. Raises what `wait` does."""
        self.wait()
        weights, tree, tensors = taken_apart(checkpoint)
        work = path.with_name(f".{path.name}.shards")
        files = {CONFIG: describe_model(self.storage.model), TREE: tree}
        writer = _Writer(work / path.name, path, files, (tuple(weights), tuple(tensors)))
        # Copies, of tensors on the CPU too: the next step changes what is there.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        saved = async_save(
            weights | tensors, storage_writer=writer, process_group=self.group, async_stager=stager
        )
        stager.close()
        self._writing = path, cast("Future[Any]", saved)

    def wait(self) -> None:
        """Wait for the checkpoint being written, with all processes. Raises Error on all of them where one
        failed: that checkpoint does not exist then, and the one before survives."""
        if self._writing is None:
            return
        path, saved = self._writing
        self._writing = None
        try:
            saved.result()
        except CheckpointException as error:
            raise Error(f"{path} cannot be written: {reason(error)}") from error
        finally:
            if dist.get_rank(self.group) == 0:
                shutil.rmtree(path.with_name(f".{path.name}.shards"), ignore_errors=True)

    def finish(self) -> None:
        """Wait for the checkpoint being written after training has failed: nothing is raised."""
        with contextlib.suppress(Exception):
            self.wait()

    def read(
        self, folder: Path, weights: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[str, Any]:
        """Return the checkpoint in `folder` with what this process holds of its tensors: of those of the
        model and the optimizers' states as of `weights`, by their names in the learner, and whole ones
        otherwise. Raises Error on all processes."""
        tree, old = read_tree(folder)
        if old:  # of 0.1, whose names and shapes are brought up to date as a whole
            return _cut(self.storage.load_checkpoint(folder), weights, optimizers)
        found = {part: describe(folder, part) for part in ("model", "training")}
        with_weights(
            self.storage.model, found["model"], folder
        )  # Error where they are not of the run's model
        shapes = put_together(folder, tree, found["training"], old)
        like = {id(x): y for x, y in _with_weights(shapes, weights, optimizers)}
        own = {name: _empty(x, like.get(id(x))) for name, x in found["training"].items()}
        model = {name: _empty(x, weights.get(PREFIX + name)) for name, x in found["model"].items()}
        read_into(folder, model | own, self.group)
        checkpoint = put_together(folder, tree, own, old)
        return checkpoint | {"state_dict": {PREFIX + name: x for name, x in model.items()}}


class _Writer(HuggingFaceStorageWriter):
    """Write each process's part of the tensors as a file for the model and one for resuming its training;
    then one process writes what is in no shard, and publishes the folder."""

    def __init__(
        self, folder: Path, path: Path, files: Mapping[str, str], names: tuple[Sequence[str], Sequence[str]]
    ):
        places = {name: place for place, part in enumerate(names, 1) for name in part}
        super().__init__(str(folder), fqn_to_index_mapping=places, save_distributed=True)
        self.folder, self.target, self.files, self.names = folder, path, files, names

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        written = {result.storage_data.relative_path for part in results for result in part}
        sizes = {name: (self.folder / name).stat().st_size for name in sorted(written)}
        known = metadata.state_dict_metadata
        model, training = ({name: _of(known[name]) for name in part} for part in self.names)
        contents = {SHARDS: index(sizes, {"model": model, "training": training}), **self.files}
        for name, text in contents.items():
            (self.folder / name).write_text(text)
        publish(self.folder, self.target)


def _of(known: Any) -> Tensor:
    return torch.empty(known.size, dtype=known.properties.dtype, device="meta")


def _empty(x: Tensor, like: Tensor | None) -> Tensor:
    """A tensor of the shape and type of x, placed as another of its shape is; else whole, on the CPU."""
    if like is None or like.shape != x.shape:
        return torch.empty_like(x, device="cpu")
    return torch.empty_like(like, dtype=x.dtype, requires_grad=False)


def _with_weights(
    checkpoint: dict[str, Any], weights: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a checkpoint that belong to a weight, each with that weight."""
    pairs = []
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=False):
        parameters = [x for group in optimizer.param_groups for x in group["params"]]
        state = saved.get("state") if isinstance(saved, dict) else None
        for place, values in state.items() if isinstance(state, dict) else ():
            if place in range(len(parameters)) and isinstance(values, dict):
                pairs += [(x, parameters[place]) for x in values.values() if isinstance(x, Tensor)]
    learning = checkpoint.get("current_model_state")  # beside their running mean, which is the model
    for name, x in learning.items() if isinstance(learning, dict) else ():
        if name in weights and isinstance(x, Tensor):
            pairs.append((x, weights[name]))
    return pairs


def _cut(
    checkpoint: dict[str, Any], weights: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """A whole checkpoint of which this process keeps its part."""
    like = {id(x): y for x, y in _with_weights(checkpoint, weights, optimizers)}
    like |= {id(x): weights[name] for name, x in checkpoint["state_dict"].items() if name in weights}

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(x) for key, x in value.items()}
        if isinstance(value, list):
            return [cut(x) for x in value]
        whole = like.get(id(value)) if isinstance(value, Tensor) else None
        if not isinstance(whole, DTensor) or whole.shape != value.shape:
            return value
        part = value.to(whole.device)
        return distribute_tensor(part, whole.device_mesh, whole.placements, src_data_rank=None)

    return cut(checkpoint)

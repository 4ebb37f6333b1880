"""FSDP2 as a strategy of Lightning's, on CPUs through gloo and on GPUs."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from lintra.io.shards import check_engine
from lintra.train.lost_processes import LaunchesWatched
from lintra.train.sharding import shard
from lintra.train.storage import Storage

if TYPE_CHECKING:
    from lintra.train.sharded_storage import ShardedStorage


class ShardedStrategy(LaunchesWatched, ModelParallelStrategy):
    """Lightning's strategy for FSDP2 over all processes of all nodes.

    Weights begin as those of the first process, which has built the model, and checkpoints go through
    `ShardedStorage`, as folders of safetensors: Lightning's own are pickled. The optimizer's state is kept
    as by any other strategy, its tensors sharded like the weights. Raises checkpoint.Error where PyTorch is
    too old for that.
    """

    lightning_restore_optimizer = True  # pyright: ignore (a property there; its own reader does it there)

    _storage: "ShardedStorage | None" = None

    def __init__(self, timeout: timedelta):
        check_engine()
        super().__init__(timeout=timeout)

    def setup_environment(self) -> None:
        from lintra.train.sharded_storage import ShardedStorage  # newer than the oldest PyTorch that trains

        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        # Of its own, since it writes while the others compute; on CPUs, where the copies are.
        group = dist.new_group(backend="gloo", timeout=self._timeout)
        assert isinstance(self.checkpoint_io, Storage)
        self._storage = ShardedStorage(self.checkpoint_io, group)

    def shard(self, model: nn.Module) -> nn.Module:
        """Return a model with the weights of the first process's, of which each keeps its part.

        The others need not have any: theirs may be on the device "meta". Where the first one's is, weights
        are left as memory happens to be, for a checkpoint to fill."""
        weights = {} if any(x.is_meta for x in model.parameters()) else model.state_dict()
        shared = self._shared(model.config)
        if self.broadcast(bool(weights)):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(shared, weights if self.global_rank == 0 else {}, options=options)
        return shared

    def shard_like(self, model: nn.Module) -> nn.Module:
        """Return a copy of a sharded model."""
        copy = self._shared(model.config)
        copy.load_state_dict(model.state_dict())
        return copy

    def _shared(self, config: Any) -> nn.Module:
        with torch.device("meta"):
            model = config.build()
        return shard(model, self.device_mesh["data_parallel"]).to_empty(device=self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return ParallelStrategy.lightning_module_state_dict(self)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        ParallelStrategy.load_model_state_dict(self, checkpoint, strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return ParallelStrategy.optimizer_state(self, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        ParallelStrategy.load_optimizer_state_dict(self, checkpoint)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begin to write a checkpoint; `wait` completes it. Raises what `wait` does, of the checkpoint
        before."""
        assert self._storage is not None
        self._storage.begin(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        assert self._storage is not None
        return self._storage.read(Path(checkpoint_path), self.lightning_module.state_dict(), self.optimizers)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is there. Raises checkpoint.Error if it cannot be."""
        assert self._storage is not None
        self._storage.wait()

    def teardown(self) -> None:
        if self._storage is not None:
            self._storage.finish()
        super().teardown()

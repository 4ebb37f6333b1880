"""Distributed data parallelism that adds in one order, whether a run is resumed or not."""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lintra.train.lost_processes import LaunchesWatched


class OrderedDDP(LaunchesWatched, DDPStrategy):
    """DDP with the buckets of the first step in every step.

    After its first backward DDP sorts gradients into buckets by the order in which they came, and the place
    in a bucket decides in which order the ranks' numbers are added: the first step of a resumed run would
    round differently from the same step of one that was never stopped. So the first backward is one of zeros,
    in the reverse order of the parameters, about that of a network.
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        model: Any = self.model
        if not isinstance(model, DistributedDataParallel):
            return
        inner: Any = model.module
        learned = [x for x in inner.parameters() if x.requires_grad]
        inner.forward = lambda: sum((0 * x).sum() for x in learned)
        model().backward()
        del inner.forward  # that of its class is back
        for x in learned:
            x.grad = None

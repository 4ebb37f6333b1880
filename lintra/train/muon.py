"""Muon: each matrix moves along its averaged gradient made orthogonal."""

import itertools
from typing import Any

import torch
from torch import Tensor

from lintra.train.sharding import is_shared, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration's polynomial a x + b x^3 + c x^5
ITERATIONS = 5
MOMENTUM = 0.95
TOGETHER = 2**22  # numbers whose directions are computed at once: more would only take memory


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for parameters that are matrices.

    `lr` counts as AdamW's does: a step is scaled by 0.2 sqrt(the longer side), the size of AdamW's updates
    (Liu et al. 2025, arXiv:2502.16982, equation 4). Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon. PyTorch's own Muon computes in bfloat16 everywhere, which takes
    most of a step on a CPU without instructions for it; this one does so on GPUs and if `bf16`, and processes
    matrices of one shape together.

    Where processes share matrices (FSDP2), each computes the directions of some of them whole: a process
    sends its shards of the averaged gradients to those that compute with them and gets its shards of the
    directions back, which is twice the bytes of its shards. (gloo has no such exchange of parts and gathers
    whole matrices instead.)
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, bf16: bool = False):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.bf16 = bf16

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            for _, alike in itertools.groupby(sorted(moved, key=_kind), _kind):
                parameters = list(alike)
                shares = parameters[0].device_mesh.size() if is_shared(parameters[0]) else 1
                most = max(1, TOGETHER // parameters[0].numel()) * shares
                for first in range(0, len(parameters), most):
                    self._move(parameters[first : first + most], group["lr"], group["weight_decay"])
        return loss

    def _move(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        """Update matrices of one shape."""
        directions = self._directions(torch.stack([self._averaged(p) for p in parameters]))
        for parameter, direction in zip(parameters, directions, strict=True):
            own = local(parameter)
            own.mul_(1 - lr * weight_decay)
            own.add_(direction, alpha=-lr * 0.2 * max(parameter.shape) ** 0.5)

    def _directions(self, averages: Tensor) -> Tensor:
        """Averages [k n m] -> directions; of matrices whose rows are sharded, the rows of this process."""
        bf16 = self.bf16 or averages.is_cuda
        if not is_shared(averages):
            return orthogonal(averages, bf16)
        from torch.distributed.tensor import DTensor, Shard

        assert isinstance(averages, DTensor)
        own = orthogonal(averages.redistribute(placements=[Shard(0)]).to_local(), bf16)
        found = DTensor.from_local(
            own,
            averages.device_mesh,
            [Shard(0)],
            run_check=False,
            shape=averages.shape,
            stride=averages.stride(),
        )
        return found.redistribute(placements=averages.placements).to_local()

    def _averaged(self, parameter: Tensor) -> Tensor:
        """Return the mean of a parameter's gradient and those before, the latest counting twice."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM)


def _kind(x: Tensor) -> tuple[Any, ...]:
    return (*x.shape, str(x.dtype), str(x.device))


def orthogonal(x: Tensor, bf16: bool = False) -> Tensor:
    """x [... n m] with its singular values pushed to about 0.7 to 1.2 and its vectors kept; zeros stay.

    In bfloat16 or at least float32. Jordan et al. 2024, "Newton-Schulz".
    """
    a, b, c = COEFFICIENTS
    y = x.to(torch.bfloat16 if bf16 else torch.promote_types(x.dtype, torch.float32))
    tall = x.shape[-2] > x.shape[-1]
    y = y.mT if tall else y
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return (y.mT if tall else y).to(x.dtype)

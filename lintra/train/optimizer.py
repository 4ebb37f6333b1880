"""The optimisers of training, built from a model and its settings."""

from typing import Any

import torch
from torch import nn

from lintra import attention
from lintra.nn.block import Block
from lintra.train.config import Config
from lintra.train.muon import Muon


def optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Raise ValueError for Muon where the model has no blocks."""
    if config.optimizer == "muon":
        return MuonAndAdamW(model, config)
    others = _groups(model, list(model.parameters()))
    if config.optimizer == "adamw":
        return torch.optim.AdamW(others, config.lr, weight_decay=config.weight_decay)
    return torch.optim.RAdam(others, config.lr, weight_decay=config.weight_decay, decoupled_weight_decay=True)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of linear maps inside blocks, AdamW for all else, as one optimiser.

    The two share a learning rate. Raises ValueError if there is no such matrix.
    """

    def __init__(self, model: nn.Module, config: Config):
        found = (
            layer.weight
            for block in model.modules()
            if isinstance(block, Block)
            for layer in block.modules()
            if isinstance(layer, nn.Linear)
        )
        matrices = list(dict.fromkeys(found))
        if not matrices:
            raise ValueError(
                "optimizer='muon' is for the matrices of blocks, and this model has no blocks: choose another"
            )
        known = {id(x) for x in matrices}
        others = _groups(model, [x for x in model.parameters() if id(x) not in known])
        decay = config.weight_decay
        self.parts = (
            Muon(matrices, config.lr, decay, bf16=config.precision == "bf16"),
            torch.optim.AdamW(others, config.lr, betas=(0.9, 0.95), weight_decay=decay),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()
        for part in self.parts:
            for group in part.param_groups:
                for name, value in part.defaults.items():  # which an older PyTorch did not have
                    group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        first, second = self.parts
        loss = first.step(closure)  # gives the gradients of both
        second.step()
        return loss

    def _share(self) -> None:
        """Have the parts work on this optimiser's groups and state: there is nothing else to save or
        change."""
        first = len(self.parts[0].param_groups)
        groups = self.param_groups[:first], self.param_groups[first:]
        for part, own in zip(self.parts, groups, strict=True):
            part.param_groups, part.state = own, self.state


def _groups(model: nn.Module, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters, those that a mechanism wants left alone, if any, without weight decay."""
    free = {id(x) for x in attention.no_weight_decay(model)}
    decayed = [x for x in parameters if id(x) not in free]
    others = [x for x in parameters if id(x) in free]
    return [{"params": decayed}, *([{"params": others, "weight_decay": 0.0}] if others else [])]

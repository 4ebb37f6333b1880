"""Make a wider and deeper decoder of a trained one that computes the same function, to be trained on.

    python experiments/images/grow.py mnist-small runs/grown
    lintra train images --preset best --start-from runs/grown --lr 1e-3

Width is doubled as in Net2Net (Chen, Goodfellow and Shlens 2016, arXiv:1511.05641, section 2.2): every
channel, head and hidden unit is duplicated, and its outgoing weight is divided between the two copies at
random, so that they learn different things. A layer norm sees the same mean and variance. New blocks and new
hidden units start with outputs of 0.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lintra import checkpoint
from lintra.tasks import images


def grow(model: Any, config: Any, generator: torch.Generator) -> Any:
    """A model of `config` that gives the outputs of `model`: of twice its width and heads, at least twice its
    feed-forward units, and as many or a multiple of its blocks. Raises ValueError if the sizes are others.
    """
    small = model.config
    own = dataclasses.replace(
        config,
        width=small.width,
        heads=small.heads,
        layers=small.layers,
        mlp_ratio=small.mlp_ratio,
        dropout=small.dropout,
    )
    units = int(small.mlp_ratio * small.width), int(config.mlp_ratio * config.width)
    if own != small or config.width != 2 * small.width or config.heads != 2 * small.heads:
        raise ValueError("config must be that of the model with twice the width and twice the heads")
    if config.layers % small.layers or units[1] < 2 * units[0]:
        raise ValueError("config must have a multiple of the model's layers and twice its feed-forward units")
    grown = config.build().to(model.head.weight.dtype)
    rows = _tables(model), _tables(grown)
    with torch.no_grad():
        for table, wide in zip(*rows, strict=True):
            wide.copy_(torch.cat((table, table), -1))
        _norm(model.norm, grown.norm)
        _linear(model.head, grown.head, generator, outputs=1)
        each = config.layers // small.layers
        for i, block in enumerate(grown.blocks):
            if i % each:
                for last in (block.attn.out_proj, block.mlp.down):
                    nn.init.zeros_(last.weight)
                    nn.init.zeros_(last.bias)
            else:
                _block(model.blocks[i // each], block, generator)
    return grown.eval()


def _block(block: Any, wide: Any, generator: torch.Generator) -> None:
    _norm(block.attn_norm, wide.attn_norm)
    _norm(block.mlp_norm, wide.mlp_norm)
    for part in range(3):  # q, k and v
        _linear(_part(block.attn.qkv_proj, part), _part(wide.attn.qkv_proj, part), generator)
    _linear(block.attn.out_proj, wide.attn.out_proj, generator)
    twice = 2 * block.mlp.up.out_features
    up, down = wide.mlp.up, wide.mlp.down
    _linear(block.mlp.up, _Part(up.weight[:twice], up.bias[:twice]), generator)
    nn.init.zeros_(down.weight[:, twice:])
    _linear(block.mlp.down, _Part(down.weight[:, :twice], down.bias), generator)


class _Part:
    """Select rows or columns of a linear map."""

    def __init__(self, weight: Tensor, bias: Tensor):
        self.weight, self.bias = weight, bias


def _part(layer: nn.Linear, i: int) -> _Part:
    return _Part(layer.weight.chunk(3)[i], layer.bias.chunk(3)[i])


def _linear(layer: Any, wide: Any, generator: torch.Generator, outputs: int = 2) -> None:
    """Copy `layer`, whose inputs stand twice in those of `wide`, and whose outputs `outputs` times."""
    weight = layer.weight.repeat(outputs, 1)
    share = 0.25 + 0.5 * torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
    wide.weight.copy_(torch.cat((share * weight, (1 - share) * weight), 1))
    wide.bias.copy_(layer.bias.repeat(outputs))


def _norm(norm: nn.LayerNorm, wide: nn.LayerNorm) -> None:
    wide.weight.copy_(norm.weight.repeat(2))
    wide.bias.copy_(norm.bias.repeat(2))


def _tables(model: Any) -> list[Tensor]:
    return [
        x.weight
        for part in (model.embedding, model.position)
        for x in part.modules()
        if isinstance(x, nn.Embedding)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Grows a trained model of digits to the size of preset best."
    )
    parser.add_argument("model", help="a model's folder, or the name of one that comes with the library")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = checkpoint.load(options.model)
    torch.manual_seed(options.seed)
    config = images.Config().build().model(model.config.attention)
    grown = grow(model, config, torch.Generator().manual_seed(options.seed))
    checkpoint.save(grown, options.folder)
    print(f"{sum(x.numel() for x in grown.parameters()):,} parameters in {options.folder}")


if __name__ == "__main__":
    main()

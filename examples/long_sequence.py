"""Trains on one text that no single process reads whole: every process has a shard of it.

torchrun --nproc-per-node 2 examples/long_sequence.py --text FILE --tokens 8192

Started by itself it is one process with the whole text, and prints the same losses. Without --text it reads
this file. The gradients are exact, not cut where a shard ends, because the layers pass their states from
process to process.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from lintra.attention import delta, softmax
from lintra.distributed import context_parallel, reduce_gradients, shard
from lintra.models import decoder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--tokens", type=int, default=1024, help="bytes of the sequence")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    content = options.text.read_bytes()[: options.tokens]
    text = torch.tensor([list(content)])  # [1 t]
    torch.manual_seed(0)
    # Three layers with a state of constant size, then one that attends to the last 128 bytes directly.
    layers = (delta.Config(), delta.Config(), delta.Config(), softmax.Config(window=128))
    model = decoder.Config(
        vocabulary=256, attention=layers, layers=4, heads=4, width=128, position="none"
    ).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    tokens, targets, mesh = model.shift(text), text, None
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        context_parallel(model, mesh)
        tokens, targets = shard(tokens, mesh), shard(targets, mesh)

    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).mT, targets, reduction="sum") / text.shape[1]
        loss.backward()
        total = loss.detach()
        if mesh is not None:
            reduce_gradients(model, mesh)
            dist.all_reduce(total)
        optimizer.step()
        if mesh is None or dist.get_rank() == 0:
            print(f"step {step}: {total.item():.4f} nats a byte")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

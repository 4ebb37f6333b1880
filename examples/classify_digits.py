"""Classify handwritten digits with your own network, built from the layers of `lintra.nn`.

python examples/classify_digits.py
python examples/classify_digits.py --attention performer

An image of 8 x 8 pixels is read as a sequence of 8 rows, and a bidirectional encoder says which digit it is.
The 1,797 images come with lintra; training takes less than a minute with linear attention. Any mechanism that
`lintra list` shows as bidirectional can be used. `--quick` trains a smaller model for a few steps, which
learns little.
"""

import argparse
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra import attention
from lintra.attention import AttentionConfig
from lintra.nn import MLP, AttentionLayer, Block, Sinusoidal

ROWS, PIXELS, CLASSES = 8, 8, 10
TESTED = 297  # images held out for the test: the last ones


class Classifier(nn.Module):
    """Images [b 8 8] of values -1 .. 1 -> the logits of their classes [b 10]."""

    def __init__(self, mechanism: AttentionConfig, *, layers: int, heads: int, width: int):
        super().__init__()
        self.embed = nn.Linear(PIXELS, width)
        self.position = Sinusoidal(width)
        self.blocks = nn.ModuleList(
            Block(AttentionLayer(width, mechanism, heads=heads, causal=False), MLP(width), width=width)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        x = x + self.position(torch.arange(ROWS)[None]).to(x.dtype)  # made in float64, whatever x is
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def digits() -> tuple[Tensor, Tensor]:
    """Return the images [n 8 8] of values -1 .. 1, and the digits [n] that they show."""
    content = np.load(str(files("lintra.tasks") / "data" / "digits.npz"))
    return torch.from_numpy(content["images"]) / 8 - 1, torch.from_numpy(content["labels"]).long()


def train(model: Classifier, images: Tensor, labels: Tensor, *, steps: int, batch: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(images), (batch,), generator=generator)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--attention", default="linear", help="a bidirectional mechanism")
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    arguments = parser.parse_args()
    names = [name for name in attention.names() if attention.mechanism(name).can.bidirectional]
    if arguments.attention not in names:
        parser.error(f"--attention must be one of {', '.join(names)}")
    mechanism = attention.for_length(attention.load(arguments.attention).Config, ROWS)
    images, labels = digits()
    torch.manual_seed(0)
    width, steps = (32, 50) if arguments.quick else (64, 300)
    model = Classifier(mechanism, layers=2, heads=4, width=width)
    train(model, images[:-TESTED], labels[:-TESTED], steps=steps, batch=64)
    model.eval()
    with torch.inference_mode():
        right = (model(images[-TESTED:]).argmax(1) == labels[-TESTED:]).float().mean()
    print(f"{100 * right:.1f} % of {TESTED} test images are classified right")


if __name__ == "__main__":
    main()

"""Train a GPT of your own with softmax attention, then the same one with linear attention instead.

python examples/nanogpt_swap.py --out swap.png

Both learn to write this repository's documentation byte by byte, from the same seed and the same pieces of
text; the picture shows their losses. The swap is one line, in `Block`. `--text FILE` takes another text, and
`--quick` takes seconds and learns little. Needs `pip install ".[train]"`.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from lintra import pictures
from lintra.attention import linear
from lintra.nn import AttentionLayer

DOCUMENTS = Path(__file__).parents[1] / "docs"
VOCABULARY = 256  # bytes


class SoftmaxAttention(nn.Module):
    """Causal self-attention as such programs usually have it, x [b t c] -> [b t c]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each with a residual; `kind` is "softmax" or "linear"."""

    def __init__(self, kind: str, width: int, heads: int):
        super().__init__()
        if kind == "softmax":
            self.attn = SoftmaxAttention(width, heads)
        else:
            self.attn = AttentionLayer(width, linear.Config(), heads=heads)  # the swap
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes [b t] -> logits of the next byte [b t n]."""

    def __init__(self, kind: str, *, layers: int, heads: int, width: int, length: int):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(kind, width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def train(model: GPT, text: Tensor, *, steps: int, batch: int, length: int) -> dict[int, float]:
    """Train on random pieces of a text; return the loss by step, in nats a byte, as the mean of ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    pieces = text.unfold(0, length + 1, 1)
    generator = torch.Generator().manual_seed(0)
    losses, curve = [], {}
    for step in range(1, steps + 1):
        piece = pieces[torch.randint(len(pieces), (batch,), generator=generator)]
        loss = functional.cross_entropy(model(piece[:, :-1]).flatten(0, 1), piece[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            curve[step] = sum(losses[-10:]) / 10
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description="One GPT, its attention swapped.")
    parser.add_argument("--out", type=Path, default=Path("swap.png"), help="where the picture goes")
    parser.add_argument("--text", type=Path, help="another text to learn")
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    arguments = parser.parse_args()
    files = [arguments.text] if arguments.text else sorted(DOCUMENTS.rglob("*.md"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    text = text.long()
    if arguments.quick:
        sizes, length, steps, batch = {"layers": 1, "heads": 2, "width": 32}, 64, 30, 4
    else:
        sizes, length, steps, batch = {"layers": 3, "heads": 4, "width": 128}, 128, 300, 8
    curves = {}
    for kind in ("softmax", "linear"):
        torch.manual_seed(0)
        model = GPT(kind, length=length, **sizes)
        begin = time.perf_counter()
        curves[kind] = train(model, text, steps=steps, batch=batch, length=length)
        seconds = time.perf_counter() - begin
        print(f"{kind}: {curves[kind][steps]:.3f} nats a byte after {steps} steps, {seconds:.0f} s")
    title = "One GPT, its attention swapped"
    pictures.curves(arguments.out, curves, x="step", y="training loss (nats a byte)", title=title)


if __name__ == "__main__":
    main()

"""Learn to write like your own text, byte by byte, in a plain PyTorch loop; then generate as an RNN.

python examples/train_text.py --text book.txt --prompt "It was" --out book

Without --text it learns this repository's documentation, in a few minutes on two cores. The model is saved in
the folder --out, and `lintra.checkpoint.load` loads it from there. `--quick` takes seconds and learns little.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from lintra import allocator, checkpoint, generation
from lintra.attention import gated
from lintra.models import decoder
from lintra.models.decoder import Decoder

DOCUMENTS = Path(__file__).parents[1] / "docs"
BYTES = 256
MECHANISM = gated.Config()  # needs no positions; others, such as linear, take position="sinusoidal"


def read(file: Path | None) -> Tensor:
    """Return the bytes of a text, or of the documentation, as symbols [n] int64."""
    files = [file] if file else sorted(DOCUMENTS.rglob("*.md"))
    content = b"\n".join(each.read_bytes() for each in files)
    return torch.tensor(list(content), dtype=torch.int64)


def loss_of(model: Decoder, pieces: Tensor) -> Tensor:
    """Return the mean loss of pieces [b t] in nats a byte: each byte from those before it, in parallel."""
    outputs = model(model.shift(pieces))  # shift: a start symbol, then all bytes but the last
    return -model.output.log_prob(outputs, pieces).mean()


def train(model: Decoder, text: Tensor, *, steps: int, batch: int, length: int) -> None:
    """Train on random pieces of the first nine tenths of a text, and print the loss of the rest."""
    allocator.keep_freed_memory()  # on a CPU: large tensors otherwise cost the clearing of their pages
    held_out = max(length, len(text) // 10)
    learned, pieces = text[:-held_out], text[-held_out:].split(length)
    if len(learned) < length:
        raise SystemExit(f"a text needs at least {2 * length} bytes, got {len(text)}")
    validation = torch.stack([piece for piece in pieces[:16] if len(piece) == length])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        first = torch.randint(len(learned) - length + 1, (batch,), generator=generator)
        loss = loss_of(model, learned[first[:, None] + torch.arange(length)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            model.eval()
            with torch.inference_mode():
                bits = loss_of(model, validation).item() / math.log(2)
            model.train()
            print(f"step {step}: {loss.item():.3f} nats a byte, held out {bits:.3f} bits a byte", flush=True)


def write(model: Decoder, prompt: str, steps: int) -> str:
    """Return a prompt and what the model writes after it; its state does not grow, however long that is."""
    model.eval()
    given = torch.tensor([list(prompt.encode())], dtype=torch.int64)
    following = generation.generate(model, given, steps=steps, temperature=0.8, seed=0)
    return bytes([*given[0].tolist(), *following[0].tolist()]).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write a text, byte by byte.")
    parser.add_argument("--text", type=Path, help="the text to learn; else this repository's documentation")
    parser.add_argument("--prompt", default="The ", help="what the model continues")
    parser.add_argument("--out", type=Path, default=Path("text-model"), help="the folder of the model")
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    arguments = parser.parse_args()
    sizes, training = {"layers": 3, "heads": 4, "width": 128}, {"steps": 800, "batch": 8, "length": 256}
    if arguments.quick:
        sizes, training = {"layers": 1, "heads": 2, "width": 32}, {"steps": 30, "batch": 8, "length": 64}
    torch.manual_seed(0)
    model = decoder.Config(vocabulary=BYTES, attention=MECHANISM, position="none", **sizes).build()
    train(model, read(arguments.text), **training)
    checkpoint.save(model, arguments.out)
    print(write(checkpoint.load(arguments.out), arguments.prompt, steps=20 if arguments.quick else 400))


if __name__ == "__main__":
    main()

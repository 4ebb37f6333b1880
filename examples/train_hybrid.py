"""Train a hybrid with Lightning, as a run: three recurrent layers, and one of softmax with a window.

python examples/train_hybrid.py --text book.txt --dir runs/hybrid

Without --text it learns the pages about mechanisms in this repository, in a few minutes on two cores. You can
kill the run and resume it with the same command. `lintra generate --model runs/hybrid` writes with it. At the
end the program prints how large the state of each layer is after 100 tokens and after 1,000. `--quick` takes
seconds and learns little. Needs `pip install ".[train]"`.
"""

import argparse
import dataclasses
from pathlib import Path

import torch

from lintra import checkpoint, train
from lintra.attention import gated, leaves, softmax
from lintra.models.decoder import Decoder
from lintra.tasks import text

DOCUMENTS = Path(__file__).parents[1] / "docs" / "mechanisms"
PATTERN = (gated.Config(), gated.Config(), gated.Config(), softmax.Config(window=128))


def create(folder: Path, data: Path, *, quick: bool) -> train.Run:
    """Return the run in a folder, or create one if there is none. Ends the program if it is another run."""
    task = text.Config(data=str(data), length=64 if quick else 256)
    # The default model of the task, with a mechanism for each layer.
    model = dataclasses.replace(task.build().model(PATTERN), layers=4)
    if quick:
        model = dataclasses.replace(model, heads=2, width=32)
    steps = {"steps": 20, "warmup": 5} if quick else {"steps": 600, "warmup": 50}
    rest = {"batch": 8, "validate_every": steps["steps"] // 4, "save_every": steps["steps"] // 4}
    settings = train.Config(**task.training_preset() | steps | rest)
    if (folder / "run.json").exists():
        run = train.Run.read(folder)
        of_text = isinstance(run.task, text.Config) and Path(run.task.data or "").resolve() == data.resolve()
        if not of_text or (run.model, run.train.steps) != (model, settings.steps):
            raise SystemExit(f"{folder} holds another run than this one: choose another --dir")
        return run
    return train.Run.create(folder, task=task, model=model, train=settings)


def state_bytes(model: Decoder, tokens: int) -> list[int]:
    """Return the size of each layer's state after so many tokens, in bytes."""
    with torch.inference_mode():
        _, state = model.extend(torch.zeros(1, tokens, dtype=torch.int64))
    return [sum(x.nbytes for x in leaves(layer.attention)) for layer in state.layers]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a hybrid of recurrent layers and softmax.")
    parser.add_argument("--text", type=Path, default=DOCUMENTS, help="a file or folder to learn")
    parser.add_argument("--dir", type=Path, default=Path("runs/hybrid"), help="the folder of the run")
    parser.add_argument("--quick", action="store_true", help="a smaller model for a few steps")
    arguments = parser.parse_args()
    run = create(arguments.dir, arguments.text, quick=arguments.quick)
    train.fit(run)
    bits = list(train.curves(run.folder)["validate_bits_per_byte"].values())
    print(f"held out: {bits[0]:.3f} bits a byte at first, {bits[-1]:.3f} in the end")
    model = checkpoint.load(run.folder)
    few, many = (state_bytes(model, n) for n in (100, 1_000))
    for block, *sizes in zip(model.blocks, few, many, strict=True):
        print(f"{block.attn.attention.name}: {sizes[0]:,} bytes after 100 tokens, {sizes[1]:,} after 1,000")


if __name__ == "__main__":
    main()

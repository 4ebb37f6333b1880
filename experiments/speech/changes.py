"""One change at a time to an encoder with linear attention or beside it, on AN4, judged in validation.

    python experiments/speech/changes.py --data DIR          train what is not trained yet
    python experiments/speech/changes.py --data DIR --list   what there is to train and what is done

Killed at any moment, the same command resumes. The test set is not looked at.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from lintra import checkpoint, train
from lintra.allocator import keep_freed_memory
from lintra.attention import delta, gated, linear, retention, softmax

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from setting import problem, task  # noqa: E402 (from this folder)
from trials import Trial, add_options, tell, train_and_keep  # noqa: E402 (from the folder above)

COMMAND = "python experiments/speech/changes.py --data DIR"
STEPS = 1_500
# A mechanism, and fields of the encoder's Config that differ from the preset's.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (softmax.Config(), {}),
    "linear": (linear.Config(), {}),
    "linear, squared ReLU": (linear.Config(feature_map=linear.SquaredRelu()), {"position": "sinusoidal"}),
    "linear, Hedgehog": (linear.Config(feature_map=linear.Hedgehog()), {}),
    "linear, not normalised": (linear.Config(normalize=False), {}),
    "linear, sinusoidal positions": (linear.Config(), {"position": "sinusoidal"}),
    "linear, 8 heads": (linear.Config(), {"heads": 8}),
    "linear, causal": (linear.Config(), {"causal": True}),
    "linear, causal, convolution of 4": (linear.Config(), {"causal": True, "conv": 4}),
    "retention": (retention.Config(), {}),
    "gated": (gated.Config(), {}),
    "gated, convolution of 4": (gated.Config(), {"conv": 4}),
    "delta, no convolution": (delta.Config(conv=None), {}),
    "delta": (delta.Config(), {}),
    "delta, alternating": (delta.Config(), {"alternating": True}),
}


def kept(name: str) -> Path:
    """The file of the outcome of a change."""
    return HERE / "changes" / f"{name.replace(', ', '-').replace(' ', '-')}.json"


def trial(name: str, data: Path) -> Trial:
    """The recogniser of the preset with one change, trained for fewer steps."""
    attention, fields = CHANGES[name]
    config = task("an4", "linear", data)
    model = problem(config).model(attention)
    training = config.training_preset() | {"steps": STEPS, "precision": "32", "save_every": 100, "seed": 0}
    return Trial(
        name=name,
        folder=HERE / "runs" / "changes" / kept(name).stem,
        task=config,
        model=dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, **fields)),
        training=train.Config(**training),
        score="symbol_errors",
        split="validate",
        kept=kept(name),
    )


def table() -> str:
    """The table of README.md: the share of wrong symbols after the last step, the best first."""
    kept_ones = {name: json.loads(kept(name).read_text()) for name in CHANGES if kept(name).exists()}
    done = {name: found for name, found in kept_ones.items() if not found.get("diverged")}
    lines = ["| encoder | parameters | wrong symbols in validation, % |", "| --- | --- | --- |"]
    for name, found in sorted(done.items(), key=lambda item: item[1]["curve"][str(STEPS)]):
        errors = 100 * found["curve"][str(STEPS)]
        lines.append(f"| {name} | {found['parameters'] / 1e6:.2f} M | {errors:.1f} |")
    lines += [f"| {name} | | diverged |" for name in kept_ones if name not in done]
    return "\n".join(lines)


def counted(one: Trial) -> dict[str, Any]:
    """Return what its file holds besides the curve."""
    return {"parameters": sum(p.numel() for p in checkpoint.load(one.folder).parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description="What keeps linear attention behind softmax on AN4.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the corpora README.md names")
    add_options(parser, minutes=170.0)
    options = parser.parse_args()
    trials = [trial(name, options.data) for name in CHANGES]
    if options.list:
        tell(trials)
        return
    keep_freed_memory()
    train_and_keep([lambda: trials], COMMAND, counted, workers=options.workers, minutes=options.minutes)
    print(table())


if __name__ == "__main__":
    main()

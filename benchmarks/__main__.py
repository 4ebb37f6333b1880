"""`python -m benchmarks NAME [--quick] [--out FILE]`, from the root of the repository."""

import sys
from collections.abc import Sequence

from lintra import cli
from lintra.cli.bench import choose

BENCHES = {
    "scaling": "time and memory up to 65,536 tokens (--peers, --device cuda)",
    "roofline": "what bounds the linear sum, arithmetic or memory",
    "busy": "what is left of the speed while other processes use the same cores",
    "recurrence": "the delta rule, decays of every feature and selective scans, beside other implementations",
    "softmax": "softmax over a few of the keys, beside PyTorch's over all of them",
    "train": "a training step of the image model with every mechanism",
    "decode": "the next token against its position",
    "drift": "what decoding loses with a state in bfloat16",
    "generation": "images a second on the CPU, fused (--model: rounded weights)",
    "runtime": "the C runtime, native and in a browser (--model: rounded weights)",
    "onnx": "prompts in onnxruntime, by products of matrices and by operators for a recurrence",
    "model": "the paper's model against the length, in training and decoding",
    "context": "a training step of one long sequence by one process, and by two",
    "journeys": "the commands from a user's own data to a result, in minutes",
    "scale": "steps of 1, 2 and 4 processes, beside what the cost model predicts",
    "predictions": "predictions of the cost model for 8 to 4,096 GPUs; nothing is measured",
    "stream": "memory and start of training on a text that is larger than memory",
    "overhead": "frames, calls and lines around the kernels, beside an older checkout (--against)",
    "drop_in": "models of transformers on lintra's CPU kernels and on transformers' functions",
    "original": "the drop-in for fast-transformers, beside the original (--checkout)",
    "regression": "the speed of everything beside an older checkout (--against)",
    "gpu": "the kernels on a GPU, a training step, decoding",
    "gpu_recurrence": "the delta rule and decays of every feature on a GPU, beside other kernels",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one benchmark -> the exit code, as `lintra.cli.run` has it."""
    return cli.run(
        lambda given: choose("python -m benchmarks", "benchmarks", BENCHES, given), args, "benchmarks"
    )


if __name__ == "__main__":
    sys.exit(main())

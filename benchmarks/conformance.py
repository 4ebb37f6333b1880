"""Laws of attention that other libraries obey: docs/conformance.md shows what this program writes.

    pip install performer-pytorch nystrom-attention linear-attention-transformer
    python -m benchmarks.conformance --out benchmarks/results/conformance.json

Every subject is a module (q, k, v, mask) -> y in the layout [b t h d]. A library's own layer runs as it is,
with its projections replaced by ones that pass q, k and v through.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lintra
from lintra.attention import linear, nystromformer, performer
from lintra.bench.reports import save
from lintra.testing import MODULE_LAWS, Report, check_module

HEADS, DIM, LANDMARKS = 4, 8, 4
MEASURES = ["benchmarks/conformance.py", "lintra/testing"]
PEERS = ("performer-pytorch", "nystrom-attention", "linear-attention-transformer")


class Part(nn.Module):
    """One of q, k and v from a row of all three [b t 3w], contiguous as a projection's output is."""

    def __init__(self, place: int):
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // 3
        return x[..., self.place * width : (self.place + 1) * width].clone()


class Layer(nn.Module):
    """A layer x -> y of a library, with identity projections; its mask has the name it has there."""

    def __init__(self, layer: nn.Module, mask: str):
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        x = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
        return self.layer(x, **{self.mask: mask}).unflatten(2, q.shape[2:])


class HeadsFirst(nn.Module):
    """A function of q, k and v [b h t d], without a mask."""

    def __init__(self, attend: nn.Module):
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Ours(nn.Module):
    """A mechanism of lintra."""

    def __init__(self, config: Any, causal: bool):
        super().__init__()
        self.attend = config.build(heads=HEADS, dim=DIM, causal=causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend(q, k, v, mask=mask)


def fast_attention(causal: bool) -> nn.Module:
    """performer-pytorch's FastAttention, the function inside its layers; it takes no mask."""
    from performer_pytorch import FastAttention  # pyright: ignore (may not be here)

    return HeadsFirst(FastAttention(DIM, causal=causal))


def performer_layer(causal: bool) -> nn.Module:
    """performer-pytorch's SelfAttention, which handles masks around FastAttention."""
    from performer_pytorch import SelfAttention  # pyright: ignore

    layer = SelfAttention(HEADS * DIM, heads=HEADS, dim_head=DIM, causal=causal)
    return Layer(_passed_through(layer), "mask")


def nystrom(causal: bool) -> nn.Module:
    """nystrom-attention's NystromAttention without its convolution of the values."""
    from nystrom_attention import NystromAttention  # pyright: ignore (may not be here)

    layer = NystromAttention(HEADS * DIM, dim_head=DIM, heads=HEADS, num_landmarks=LANDMARKS, residual=False)
    layer.to_qkv, layer.to_out = nn.Identity(), nn.Identity()
    return Layer(layer, "mask")


def linear_layer(causal: bool) -> nn.Module:
    """linear-attention-transformer's SelfAttention, with all heads global, and no blind spot if causal."""
    from linear_attention_transformer.linear_attention_transformer import SelfAttention  # pyright: ignore

    layer = SelfAttention(HEADS * DIM, HEADS, causal=causal, blindspot_size=1)
    return Layer(_passed_through(layer), "input_mask")


def _passed_through(layer: Any) -> nn.Module:
    layer.to_q, layer.to_k, layer.to_v, layer.to_out = Part(0), Part(1), Part(2), nn.Identity()
    return layer


def ours(config: Any) -> Callable[[bool], nn.Module]:
    """A mechanism of lintra, causal or not."""
    return lambda causal: Ours(config, causal)


# name, what builds it, modes (causal or not), whether it takes a mask
SUBJECTS = [
    ("performer-pytorch FastAttention", fast_attention, (False, True), False),
    ("performer-pytorch SelfAttention", performer_layer, (False, True), True),
    ("nystrom-attention NystromAttention", nystrom, (False,), True),
    ("linear-attention-transformer SelfAttention", linear_layer, (False, True), True),
    ("lintra performer", ours(performer.Config()), (False, True), True),
    ("lintra nystromformer", ours(nystromformer.Config(landmarks=LANDMARKS)), (False,), True),
    ("lintra linear", ours(linear.Config()), (False, True), True),
]


def measure() -> list[Report]:
    """Return the report of each subject in each of its modes."""
    reports = []
    for name, build, modes, mask in SUBJECTS:
        for causal in modes:
            torch.manual_seed(0)
            subject = build(causal)
            mode = "causal" if causal else "bidirectional"
            options = {"causal": causal, "mask": mask, "fixed_heads": True, "name": f"{name}, {mode}"}
            reports.append(check_module(subject, heads=HEADS, dim=DIM, **options))
    return reports


def table(report: dict[str, Any]) -> str:
    """Return a row for each law and a column for each subject: yes, no, or empty if it does not apply."""
    subjects = report["subjects"]
    words = {"passed": "yes", "failed": "**no**", "not applicable": ""}
    lines = [f"| law | {' | '.join(each['subject'] for each in subjects)} |"]
    lines.append("| --- " * (len(subjects) + 1) + "|")
    for law in subjects[0]["outcomes"]:
        cells = [words[each["outcomes"][law]] for each in subjects]
        if any(cells):
            lines.append(f"| `{law}` | {' | '.join(cells)} |")
    counts = [f"{each['passed']} of {each['applicable']}" for each in subjects]
    lines.append(f"| passed of applicable | {' | '.join(counts)} |")
    return "\n".join(lines)


def failures(report: dict[str, Any]) -> str:
    """Return a row for each law that fails, with the smallest input that shows it."""
    lines = ["| subject | law | smallest input | what is seen |", "| --- | --- | --- | --- |"]
    for each in report["subjects"]:
        for failure in each["failures"]:
            sizes = ", ".join(f"{name} {size}" for name, size in failure["sizes"].items())
            said = " ".join(failure["message"].split()).replace("|", "\\|")
            said = said if len(said) <= 160 else said[:157] + "..."
            lines.append(f"| {each['subject']} | `{failure['law']}` | {sizes} | {said} |")
    return "\n".join(lines)


def main() -> None:
    """Print the reports and save them."""
    parser = argparse.ArgumentParser(description="The laws of attention, applied to other libraries.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args()
    reports = measure()
    print("\n\n".join(map(str, reports)))
    save(
        options.out,
        command=shlex.join(["python", "-m", "benchmarks.conformance", *sys.argv[1:]]),
        versions={
            "lintra": lintra.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            **{name: metadata.version(name) for name in PEERS},
        },
        measures=MEASURES,
        sizes={"heads": HEADS, "dim": DIM, "landmarks": LANDMARKS, "laws": len(MODULE_LAWS)},
        subjects=[report.as_dict() for report in reports],
    )


if __name__ == "__main__":
    main()

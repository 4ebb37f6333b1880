"""The tasks of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006) as problems of a comparison.

Layers, widths, heads, steps and batches of "paper" are those of the configurations that its authors released.
For images and Pathfinder, whose released ones are smaller than the paper says, they are those of the paper's
appendix. Predictions are made from the mean over tokens. The authors' models make those of ListOps and text
from one more token, that of the class.
"""

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any

from experiments.compare.problems import RATES, Problem, Study, refuse_others
from lintra.models import encoder
from lintra.tasks import image_classification, images, listops, pathfinder, text_classification
from lintra.tasks.base import DataError

TASKS = ("listops", "text", "image", "pathfinder")
_SMALL: dict[str, Any] = {"layers": 2, "width": 64, "heads": 2, "dropout": 0.0}
# SHA-256 of the pixels of the training images, [50000 32 32 3], their classes, and those of the test images.
CIFAR_10 = "4f137dd014ac9e7d7771e008a0b7aa67bbb2438abac0a7711eb0b71afadfb430"
REVIEWS = {
    "imdb_train.tsv.xz": "905621371fc80e96c8d59991deaa98db3f2b6c5fe34acd880e4e4a93aa005844",
    "imdb_test.tsv.xz": "46508b84fb23e4cca867bee1d3c7aaa7450b95d0399144f93575cd0c77189a1b",
}
_BYTES = 1_000  # of a review, of the released configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reviews(Problem):
    """Bytes of IMDB reviews, positive or negative: a tenth of the training file validates."""

    files: dict[str, str] = dataclasses.field(default_factory=lambda: dict(REVIEWS))
    length: int = _BYTES

    def task(self, data: Path | None) -> Any:
        train, test = (None if data is None else str(data / name) for name in self.files)
        return text_classification.Config(data=train, test=test, length=self.length, classes=("0", "1"))

    def model(self, attention: Any, network: dict[str, Any]) -> Any:
        """As the task's own method, which reads its data to count the classes."""
        fields = {"vocabulary": 256, "outputs": 2, "mlp_ratio": 2, "position": "sinusoidal", "pool": "mean"}
        return encoder.Config(attention=attention, **{**fields, **self.network, **network})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Problem):
    """CIFAR-10 in grey, pixel by pixel; the files are those that `lintra train images` reads."""

    def task(self, data: Path | None) -> Any:
        return image_classification.Config(data_dir=None if data is None else str(data))

    def check(self, data: Path | None) -> None:
        """End the program unless `data` holds CIFAR-10, in any form that is read: its pixels and classes."""
        try:
            splits = images.locate("cifar10", str(self.folder("CIFAR-10", data)), labels=True)
            found = hashlib.sha256()
            for name in ("train", "test"):
                found.update(images.first(None, getattr(splits, name)))
                found.update(splits.labels(name))
        except DataError as error:
            sys.exit(str(error))
        refuse_others(f"CIFAR-10 in {data}", found.hexdigest(), CIFAR_10)


PROBLEMS = (
    Problem(
        name="listops",
        title="ListOps of 51 to 199 tokens",
        steps={"small": 600},
        causal=False,
        settings=listops.Config(shortest=50, longest=200, depth=5),
        network=_SMALL,
    ),
    Reviews(
        name="text",
        title=f"Text, the first {_BYTES:,} bytes of IMDB reviews",
        steps={"small": 4_000},  # after 1,000 steps linear attention is at chance
        causal=False,
        batch=16,
        rates=RATES[:4],  # 0.03 is left out to save time: it was not tried on texts
        halvings=1,
        network={**_SMALL, "layers": 1},
    ),
    Images(
        name="image",
        title="Image, CIFAR-10 in 32 x 32 grey pixels",
        steps={"small": 400},
        causal=False,
        batch=16,
        network=_SMALL,
    ),
    Problem(
        name="pathfinder",
        title="Pathfinder, 32 x 32 pixels",
        steps={"small": 400},
        causal=False,
        batch=16,
        settings=pathfinder.Config(),
        network=_SMALL,
    ),
    Problem(
        name="listops-paper",
        title="ListOps, the paper's size",
        steps={"paper": 5_000},
        causal=False,
        settings=listops.Config(),
        network={"layers": 6, "width": 512, "heads": 8, "mlp_ratio": 4},
    ),
    Reviews(
        name="text-paper",
        title="Text, the paper's size",
        steps={"paper": 20_000},
        causal=False,
        network={"layers": 4, "width": 256, "heads": 4, "mlp_ratio": 4, "dropout": 0.1},
    ),
    Images(
        name="image-paper",
        title="Image, the paper's size",
        steps={"paper": 39_000},
        causal=False,
        batch=256,
        network={"layers": 3, "width": 64, "heads": 4, "mlp_ratio": 2},
    ),
    Problem(
        name="pathfinder-paper",
        title="Pathfinder, the paper's size",
        steps={"paper": 62_500},
        causal=False,
        batch=512,
        settings=pathfinder.Config(),
        network={"layers": 4, "width": 128, "heads": 8, "mlp_ratio": 1},
    ),
)
ARENA = Study(
    "python -m experiments.lra",
    Path(__file__).parent,
    PROBLEMS,
    {"small": TASKS, "paper": tuple(f"{name}-paper" for name in TASKS)},
    ("operators.json", "frequencies.json"),
)

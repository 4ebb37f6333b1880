"""`python -m benchmarks stream`: memory and start of training on a text that is larger than memory should be.

The documentation, repeated, makes a small and a large text file in a temporary folder. Each is prepared, and
trained on for some steps of a tiny model, in processes of their own. Memory is what no file stands behind
(RssAnon of proc(5)): pages of mapped shards belong to the system, which takes them back when it needs them.
The large text and its shards take up twice its size on the disk for a while.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lintra.bench.memory import anonymous, printed_by
from lintra.bench.reports import Row
from lintra.bench.timing import Timing

MEASURES = ("lintra/tasks/datasets", "lintra/tasks/text.py", "lintra/train")
PAGES = Path(__file__).parents[1] / "docs"
GROWTH = 32  # MB more with the large text than with the small one, at most: about a few large tensors
START = 5  # seconds, at most


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The texts, and the network that learns from them."""

    small: int = 16_000_000  # bytes
    large: int = 2_000_000_000
    length: int = 512
    batch_tokens: int = 8_192
    steps: int = 50
    layers: int = 2
    width: int = 64

    @property
    def turns(self) -> int:
        """Return the number of steps of `progress`: preparing and training, twice."""
        return 4


QUICK = Sizes(small=50_000, large=400_000, length=32, batch_tokens=128, steps=2, layers=1, width=16)


def run(sizes: Sizes, progress: Callable[[int], None]) -> tuple[list[Row], dict[str, Timing]]:
    """Prepare and train on both texts -> the table's rows, no timings."""
    rows: list[Row] = []
    memory = []
    for turn, size in enumerate((sizes.small, sizes.large)):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            write_text(place / "text.txt", size)
            prepared = _in_a_process(f"prepare({folder!r})")
            progress(2 * turn + 1)
            (place / "text.txt").unlink()
            trained = _in_a_process(f"train({folder!r}, Sizes(**{asdict(sizes)!r}), {time.time()!r})")
            progress(2 * turn + 2)
        memory.append((prepared["bytes"], trained["bytes"]))
        name, last = f"{size / 1e6:,g} MB", size == sizes.large
        rows += [
            Row(f"{name}: preparing", size / 1e6 / prepared["seconds"], "MB/s"),
            Row(f"{name}: memory while preparing", prepared["bytes"] / 1e6, "MB"),
            Row(f"{name}: from the program's start to the first batch", trained["start"], "s"),
            Row(f"{name}: of that, imports", trained["imports"], "s"),
            Row(f"{name}: memory while training", trained["bytes"] / 1e6, "MB"),
        ]
        if last:
            rows[-3] = replace(rows[-3], at_most=START)
    for what, small, large in zip(("preparing", "training"), *memory, strict=True):
        rows.append(Row(f"memory while {what}: growth", (large - small) / 1e6, "MB", at_most=GROWTH))
    return rows, {}


def write_text(file: Path, size: int) -> None:
    """Write the documentation, again and again, into a text of about `size` bytes."""
    pages = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))).encode()
    with open(file, "wb") as text:
        copy = 0
        while text.tell() < size:
            text.write(f"\nCopy {copy}\n".encode())
            text.write(pages[: size - text.tell()])
            copy += 1
        text.truncate(size)


def _in_a_process(call: str) -> dict[str, float]:
    """Return what a function of this module prints when it runs in a process of its own."""
    return json.loads(printed_by(f"from benchmarks.stream import Sizes, prepare, train\n{call}\n"))


def prepare(folder: str) -> None:
    """Write the shards of `folder`/text.txt, and print the seconds and the most memory."""
    from lintra.tasks.datasets.documents import documents
    from lintra.tasks.datasets.shard_writer import write_shards

    most, start = 0, time.perf_counter()

    def look(done: int) -> None:
        nonlocal most
        most = max(most, anonymous())

    place = Path(folder)
    longest = min(2**20, (place / "text.txt").stat().st_size // 1000)  # some of them are held out
    read = documents([place / "text.txt"], longest=longest, report=look)
    write_shards(place / "shards", read, None, held_out=0.05)
    print(json.dumps({"seconds": time.perf_counter() - start, "bytes": most}))


def train(folder: str, sizes: Sizes, begun: float) -> None:
    """Train on the shards of `folder` for some steps, and print the seconds since `begun` and of imports, and
    the most memory at the beginning of a step."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from lintra import train
    from lintra.attention import linear
    from lintra.tasks import Batch, text
    from lintra.train.learner import Learner

    torch.set_num_threads(1)
    imports = time.time() - begun
    found = {"imports": imports, "bytes": 0}
    begin = Learner.on_train_batch_start

    def look(self: Learner, batch: Batch, batch_idx: int) -> None:
        found.setdefault("start", time.time() - begun)
        found["bytes"] = max(found["bytes"], anonymous())
        begin(self, batch, batch_idx)

    Learner.on_train_batch_start = look
    task = text.Config(data=f"{folder}/shards", length=sizes.length, batch_tokens=sizes.batch_tokens)
    model = task.build().model(linear.Config())
    shape = {"layers": sizes.layers, "width": sizes.width, "heads": 2}
    settings = train.Config(steps=sizes.steps, validate_every=sizes.steps, precision="32")
    begun_run = train.Run.create(f"{folder}/run", task=task, model=replace(model, **shape), train=settings)
    train.fit(begun_run, verbosity="result")
    print(json.dumps(found))

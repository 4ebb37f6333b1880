"""Seed inputs for tests/runtime/fuzz.c, one of each kind: python -m tests.runtime.corpus FOLDER."""

import sys
from pathlib import Path

from lintra.export import runtime as export
from lintra.runtime import Model, Sequence
from tests.kinds import build
from tests.runtime import recognisers
from tests.runtime.kinds import KINDS


def write(folder: Path) -> list[Path]:
    """Write the files. Each is an even byte, a model and a state of that model."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [build(**{"layers": 1} | changes) for changes in KINDS.values()]
    files = []
    for i, model in enumerate([*models, *map(recognisers.build, recognisers.RECOGNISERS)]):
        content = export.to_bytes(model, export.WEIGHTS[i % len(export.WEIGHTS)])
        sequence = Sequence(Model(content))
        if i < len(models):
            sequence.prefill([0, 1 % model.config.vocabulary])
        else:
            sequence.read(recognisers.frames(model, model.config.subsample))
        files.append(folder / f"kind-{i:02d}")
        files[-1].write_bytes(b"\0" + content + sequence.save())
    return files


if __name__ == "__main__":
    write(Path(sys.argv[1]))

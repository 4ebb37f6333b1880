"""Train a recogniser of AN4's letters and numbers to hear audio, and pack it to come with the library.

    lintra train speech --data an4 --normalize global --alternating --attention delta \\
        --speeds 0.85 0.925 1.0 1.075 1.15 --precision 32 --steps 10000 --lr 0.002 --dir RUN
    python experiments/speech/letters.py RUN FOLDER --data DIR

AN4 comes as mel cepstra without its audio: 13 numbers a frame, each a mean over log-mel energies weighted by
a cosine, from CMU Sphinx (its "legacy" transform, 40 filters of unit area from 130 to 6,800 Hz, 16 kHz). A
recogniser's first convolution is linear in these cepstra, and they are linear in the log-mel energies that
the library computes from audio. Both are merged into one map here, so that the recogniser reads energies
wherever it runs. The difference that remains (a Hamming window there, Povey's here) is a tenth of what
cepstra vary by.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lintra import checkpoint, evaluate, train
from lintra.allocator import keep_freed_memory
from lintra.audio import features
from lintra.bench import reports
from lintra.models import CTC
from lintra.speech import Search
from lintra.speech.corpus import Corpus, describe_skipped, prepare
from lintra.tasks import speech

sys.path.insert(0, str(Path(__file__).parents[1]))
import ship

COMMAND = "python experiments/speech/letters.py RUN FOLDER --data DIR"
AGAIN = COMMAND.replace("RUN", ship.TRAINED)
CEPSTRA = 13
AUDIO = features.Config(rate=16_000, bins=40, frame_ms=25.625, shift_ms=10.0, low_hz=130.0, high_hz=6_800.0)
LEVELS = (-12, -6, 0, 6, 12)  # decibels by which test utterances are amplified


def cosines(bins: int = AUDIO.bins) -> np.ndarray:
    """The cepstra of log-mel energies, as a matrix [cepstra bins]; the first bin halved, as by Sphinx."""
    angles = np.pi * np.arange(CEPSTRA)[:, None] * (np.arange(bins) + 0.5) / bins
    matrix = np.cos(angles) / bins
    matrix[:, 0] /= 2
    return matrix


def unit_area(config: features.Config = AUDIO) -> np.ndarray:
    """Return how much log-mel energies [bins] grow if each triangle has an area of 1, not a height of 1."""
    low, high = (1127 * np.log1p(hz / 700) for hz in (config.low_hz, config.top_hz))
    edges = 700 * np.expm1(np.linspace(low, high, config.bins + 2) / 1127)
    return np.log(2 / (edges[2:] - edges[:-2]))


def lifted(cepstra: np.ndarray) -> np.ndarray:
    """The smoothest log-mel energies [.. bins] with these cepstra [.. 13]."""
    return (cepstra @ np.linalg.pinv(cosines()).T - unit_area()).astype(np.float32)


def hearing(model: CTC) -> CTC:
    """Turn a recogniser of cepstra into one of log-mel energies. Raises ValueError for other recognisers."""
    old = model.config
    if old.normalize != "global" or old.features.kind != "given" or old.features.bins != CEPSTRA:
        raise ValueError(
            f"needs a recogniser of {CEPSTRA} given numbers a frame with normalize='global', got "
            f"{old.features.bins} {old.features.kind} with {old.normalize!r}"
        )
    if not model.stages:
        raise ValueError(f"needs a convolution to put the cosines in, got subsample={old.subsample}")
    made = dataclasses.replace(old, features=AUDIO).build()
    state = dict(model.state_dict())
    matrix = torch.from_numpy(cosines()) * state["scale"].double()[:, None]  # [cepstra bins]
    kernel = state["stages.0.weight"]  # [o cepstra 3]
    state["stages.0.weight"] = torch.einsum("ock,cb->obk", kernel.double(), matrix)
    # Zeros stand where there are no frames: they are the mean of the cepstra, as before.
    state["mean"] = torch.from_numpy(lifted(state["mean"].double().numpy()))
    state["scale"] = torch.ones(AUDIO.bins)
    made.to(kernel.dtype).load_state_dict(state)
    return made.eval()


def errors(model: CTC, corpus: Corpus, decibels: float = 0.0) -> dict[str, Any]:
    """The error rates of a recogniser of log-mel energies on a corpus of cepstra, amplified by so much.

    Ends the program if an utterance cannot be used."""
    louder = lifted(corpus.features) + np.float32(decibels * np.log(10) / 10)
    heard = dataclasses.replace(corpus, features=louder)
    texts, skipped = evaluate.transcripts(model, heard, range(len(heard)), Search(), batch=8)
    if skipped:
        sys.exit(describe_skipped(skipped))
    rates = evaluate.error_rates(texts, model.config.symbols.unit)
    return {unit: dataclasses.asdict(rate) for unit, rate in rates.items()}


def card(name: str, model: CTC, evaluation: dict[str, Any]) -> str:
    """The beginning of README.md of the packed model."""
    levels = evaluation["levels"]
    shown = ", ".join(f"{levels[str(x)]['character']['rate']:.1%} at {x:+} dB" for x in LEVELS if x)
    return f"""# {name}

A transformer (attention `{ship.mechanism_name(model.config.encoder)}`, every second layer reading from
the end) that writes down spelled names, spoken numbers and a few command words in English,
from {AUDIO.bins} mel filters at {AUDIO.rate:,} Hz, {model.config.subsample} frames merged into one.
{ship.shape(model.config.encoder, model)}

```sh
lintra transcribe --model {name} FILE.wav
```

{ship.rates_table(evaluation, "utterances")}

Written by `{COMMAND}` in [evaluation.json](evaluation.json), without a language
model, on AN4's official test set: 10 speakers, none of whom it was trained on. This model was scored on them
once, but its kind, delta layers that alternate, was chosen when other models' errors on the same
utterances were known, so these figures may be a little low. Our copy of AN4 has mel cepstra and no
audio, and the model was trained on the cepstra. Cosines in its first convolution make it hear audio, and
the test cepstra are converted into the energies that it reads.

- **Data**: AN4 (CMU, 1991; "free for use for any purpose"): 948 utterances of 74 speakers, 42 minutes.
- **Meant for** trying the library. It knows 99 words, the letters among them. Loudness matters: the share of
  wrong characters is {shown}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a recogniser of AN4's cepstra hear audio.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the training")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model is packed")
    parser.add_argument("--data", type=Path, required=True, help="folder with AN4, as README.md says")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    try:
        ship.refuse_others(options.folder)
        run = train.Run.read(options.run)
        if not isinstance(run.task, speech.Config) or run.task.data != "an4":
            parser.error(f"RUN must be a training with --data an4, {options.run} is another")
        made = hearing(checkpoint.load(run.folder))
        made.half().float()  # the precision in which it is stored
        task = dataclasses.replace(run.task, data_dir=str(options.data)).build()
        corpus, skipped = prepare(task.tested, task.features, cache=None)
    except (checkpoint.Error, ValueError) as error:
        sys.exit(str(error))
    if skipped:
        sys.exit(describe_skipped(skipped))
    levels = {str(level): errors(made, corpus, level) for level in LEVELS}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, ship.EVALUATION)
        found = {"test_samples": len(corpus), "scores": levels["0"], "levels": levels}
        reports.save(file, command=COMMAND, **found)
        scores = file.read_text()
    ship.pack(run, options.folder, model=made, scores=scores, card=card, after=AGAIN)
    print(json.dumps({level: of["character"]["rate"] for level, of in levels.items()}, indent=1))


if __name__ == "__main__":
    main()

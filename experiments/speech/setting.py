"""The corpora, models and targets of this experiment."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from lintra.attention import delta, linear, lsh, softmax
from lintra.models import ctc
from lintra.tasks import speech

HERE = Path(__file__).parent
CORPORA = {"an4": "AN4", "fsdd": "digit strings"}
UNIT = {"an4": "character", "fsdd": "word"}  # the unit that is written, and in which errors are counted
ASKED = {"an4": 0.12, "fsdd": 0.05}  # the targets: the highest error rates allowed
SPELLED = ("an4",)  # corpora whose transcripts have structure beyond the sounds, which n-grams can use
MODELS = {
    "Bi-LSTM": linear.Config(),  # has no attention
    "softmax": softmax.Config(),
    "LSH-4": lsh.Config(rounds=4, chunk=32, redraw_every=None),
    "linear": linear.Config(),
    "delta": delta.Config(),  # hears only what came before
    "alternating delta": delta.Config(),  # every second layer reads from the end of the utterance
}
BEST, WITH_NGRAMS = "best path", "with 6-grams"  # the kinds of search for a text
COMMAND = "python experiments/speech/run.py --data DIR"


def task(corpus: str, model: str, data: Path, **changes: Any) -> speech.Config:
    kind = "bilstm" if model == "Bi-LSTM" else "transformer"
    return speech.Config(data=corpus, data_dir=str(data), encoder=kind, units=UNIT[corpus], **changes)  # pyright: ignore[reportArgumentType]


def network(one: speech.Speech, model: str) -> ctc.Config:
    """The Config of a model for a task's own."""
    config = one.model(MODELS[model])
    if model != "alternating delta":
        return config
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, alternating=True))


@functools.cache
def problem(config: speech.Config) -> speech.Speech:
    """The task, its data read once."""
    return config.build()

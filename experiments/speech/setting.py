"""The corpora and the models of this experiment, and what is asked of them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from lintra.attention import delta, linear, lsh, softmax
from lintra.models import ctc
from lintra.tasks import speech

HERE = Path(__file__).parent
CORPORA = {"an4": "AN4", "fsdd": "digit strings"}
UNIT = {"an4": "character", "fsdd": "word"}  # what is written, and whose error rate is asked for
ASKED = {"an4": 0.12, "fsdd": 0.05}  # the most of these errors
SPELLED = ("an4",)  # corpora whose transcripts say more than what was heard: n-grams of them help
MODELS = {
    "Bi-LSTM": linear.Config(),  # has no attention
    "softmax": softmax.Config(),
    "LSH-4": lsh.Config(rounds=4, chunk=32, redraw_every=None),
    "linear": linear.Config(),
    "delta": delta.Config(),  # hears only what was said so far
    "alternating delta": delta.Config(),  # every second layer from the end of the utterance
}
BEST, WITH_NGRAMS = "best path", "with 6-grams"  # how a text is searched
COMMAND = "python experiments/speech/run.py --data DIR"


def task(corpus: str, model: str, data: Path, **changes: Any) -> speech.Config:
    kind = "bilstm" if model == "Bi-LSTM" else "transformer"
    return speech.Config(data=corpus, data_dir=str(data), encoder=kind, units=UNIT[corpus], **changes)  # pyright: ignore[reportArgumentType]


def network(one: speech.Speech, model: str) -> ctc.Config:
    """The Config of a model for a task of its own."""
    config = one.model(MODELS[model])
    if model != "alternating delta":
        return config
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, alternating=True))


@functools.cache
def problem(config: speech.Config) -> speech.Speech:
    """The task, its data read once."""
    return config.build()

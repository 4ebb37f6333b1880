"""Files that a user names must be regular files: a pipe, which could block forever, is refused."""

import os
import signal

import pytest
import torch

from lintra import checkpoint, pictures
from lintra.audio import features, lines
from lintra.io import files, tensors
from lintra.runtime import Model
from lintra.speech import corpus, manifest, utterance_features
from lintra.tasks import series, text, text_classification
from lintra.tasks.datasets import text_files
from lintra.train import Run

READERS = {
    "text": lambda pipe: text.Config(data=str(pipe)).build().train,
    "a folder of texts": lambda pipe: text.Config(data=str(pipe.parent)).build().train,
    "tsv": lambda pipe: text_classification.Config(data=str(pipe)).build().train,
    "series": lambda pipe: series.Config(data=str(pipe.rename(pipe.with_name("text.csv")))).build().train,
    "compressed": lambda pipe: text_files.content(pipe.rename(pipe.with_suffix(".gz"))),
    "lines": lambda pipe: list(lines.lines(pipe)),
    "manifest": manifest.read_manifest,
    "kaldi": lambda pipe: manifest.read_kaldi(pipe.rename(pipe.with_name("text")).parent),
    "array": lambda pipe: utterance_features.load(pipe.rename(pipe.with_suffix(".npy"))),
    "arrays": lambda pipe: utterance_features.load(pipe.rename(pipe.with_suffix(".npz"))),
    "cache": lambda pipe: corpus.prepare(
        [], features.Config(), cache=pipe.rename(pipe.with_suffix(".safetensors"))
    ),
    "json": files.read_json,
    "run": lambda pipe: Run.read(pipe.rename(pipe.with_name("run.json")).parent),
    "model": lambda pipe: checkpoint.load(pipe.rename(pipe.with_name("config.json")).parent),
    "tensors": tensors.read_tensors,
    "state": lambda pipe: checkpoint.load_state((torch.zeros(1),), pipe),
    "image": lambda pipe: pictures.read(pipe, (28, 28, 1)),
    "runtime": Model.open,
}


@pytest.fixture
def pipe(tmp_path):
    """A pipe without a writer: opening it blocks until the alarm."""

    def waited(*_):
        raise AssertionError("opened a pipe and waited")

    (tmp_path / "files").mkdir()
    os.mkfifo(tmp_path / "files" / "pipe")
    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(20)
    yield tmp_path / "files" / "pipe"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_pipe_is_refused(pipe, read):
    with pytest.raises(ValueError, match=r"(pipe|text|run\.json|config\.json)\S* is not a regular file"):
        read(pipe)

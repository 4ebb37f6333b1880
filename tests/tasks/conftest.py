"""A small MNIST, a local web server that can be told to fail, and a step of training."""

import gzip
import hashlib
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from lintra.attention import linear
from lintra.tasks import Task
from lintra.tasks.datasets import mnist


def idx(images: np.ndarray) -> bytes:
    """[n h w] uint8 as an IDX file."""
    return b"\0\0\x08\x03" + struct.pack(">3I", *images.shape) + images.tobytes()


def idx_labels(labels: np.ndarray) -> bytes:
    """[n] uint8 as an IDX file."""
    return b"\0\0\x08\x01" + struct.pack(">I", len(labels)) + labels.tobytes()


def assert_a_step_lowers_the_loss(task: Task, samples: int) -> None:
    """Assert it for one step of gradient descent on the first samples, with the default model of the task."""
    model = task.model(linear.Config()).build()
    batch = task.train.__getitems__(range(samples))
    before = task.loss(model, batch)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    assert task.loss(model, batch) < before


class SmallMnist:
    """5 + 3 random images as files in a folder, with the checksums that `mnist` is patched to expect."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        draw = np.random.default_rng(0)
        self.folder = folder
        self.train, self.test = (draw.integers(0, 256, (n, 28, 28), np.uint8) for n in (5, 3))
        self.labels = {"train": np.array([3, 1, 4, 1, 5], np.uint8), "test": np.array([9, 2, 6], np.uint8)}
        self.files = {
            "train-images-idx3-ubyte": idx(self.train),
            "t10k-images-idx3-ubyte": idx(self.test),
        }
        self.label_files = {
            "train-labels-idx1-ubyte": idx_labels(self.labels["train"]),
            "t10k-labels-idx1-ubyte": idx_labels(self.labels["test"]),
        }
        self.zipped, self.zipped_labels = (
            {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
            for files in (self.files, self.label_files)
        )
        every = self.files | self.label_files | self.zipped | self.zipped_labels
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in every.items()}
        monkeypatch.setattr(mnist, "_SHA256", sums)
        monkeypatch.setattr(mnist, "TRAIN_IMAGES", 5)
        monkeypatch.setattr(mnist, "TEST_IMAGES", 3)

    def write(self, files: dict[str, bytes]) -> None:
        self.folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    return SmallMnist(tmp_path / "mnist", monkeypatch)


class Server:
    """Serve `files` by name; for those in `broken`, send half and hang up."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.removeprefix("/data/")
                server.asked.append(name)
                if name not in server.files:
                    self.send_error(404)
                    return
                content = server.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if name in server.broken else content)

            def log_message(self, format, *args):
                """Log nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/data"

    def stop(self) -> None:
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The server, as the mirror for all downloads; the user's cache is in `tmp_path`."""
    server = Server()
    monkeypatch.setenv("LINTRA_MIRROR", server.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("LINTRA_DATA", raising=False)
    yield server
    server.stop()

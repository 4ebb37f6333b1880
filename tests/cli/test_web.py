"""`lintra web`."""

import socket

import pytest

from lintra import checkpoint, web
from lintra.cli.model import open_model
from lintra.tasks import copy, digits
from tests.runtime.recognisers import build


def test_one_file(lintra_says, folder, tmp_path):
    run = folder("run", digits.Config())
    code, out, err = lintra_says("web", "--model", "run", "--out", "page.html")
    assert (code, err) == (0, "")
    assert out.startswith("page.html: ")
    opened = open_model(run.folder, "cpu", None)
    model, task = opened.model, opened.task
    assert (tmp_path / "page.html").read_text() == web.page(model, task, "run")
    lintra_says("web", "--model", "run", "--out", "page.html", "--weights", "int8")
    assert (tmp_path / "page.html").read_text() == web.page(model, task, "run", "int8")


def test_a_recogniser_has_a_page_of_its_own(lintra_says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = lintra_says("web", "--model", "spoken-digits", "--out", "page.html")
    assert (code, err) == (0, "")
    assert (tmp_path / "page.html").read_text() == web.page(
        checkpoint.load("spoken-digits"), None, "spoken-digits"
    )


def test_a_recogniser_that_cannot_stream(lintra_says, tmp_path, monkeypatch):
    """It needs no run.json; an error message names what is missing."""
    monkeypatch.chdir(tmp_path)
    checkpoint.save(build(normalize="utterance"), tmp_path / "whole")
    code, out, err = lintra_says("web", "--model", "whole")
    assert (code, out) == (2, "")
    assert "there is no page for whole: normalize='utterance' takes the mean of all frames" in err


def test_served_until_ctrl_c(lintra_says, folder, monkeypatch):
    folder("run", digits.Config())
    served = []

    def interrupted(server):
        served.append((server.address, server.content))
        raise KeyboardInterrupt

    monkeypatch.setattr(web.Server, "serve_forever", interrupted)
    code, out, err = lintra_says("web", "--model", "run", "--port", "0")
    assert (code, err) == (0, "")
    [(address, content)] = served
    assert out == f"{address} (Ctrl-C ends it)\n"
    assert content.startswith(b"<!doctype html>")


def test_a_port_in_use(lintra_says, folder):
    folder("run", digits.Config())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, out, err = lintra_says("web", "--model", "run", "--port", str(port))
    reason = f"port {port} of 127.0.0.1 is in use; another --port, or 0 for a free one"
    assert (code, out, err) == (2, "", f"lintra: {reason}\n")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--port", "65536"], "port must lie in 0 .. 65535, got 65536"),
        (["--port", "-1"], "port must lie in 0 .. 65535, got -1"),
        (["--out", "page.txt"], "out must end in .html, got page.txt"),
        (
            ["--out", "page.html", "--port", "0"],
            "port is for a page that is served, and out writes it to page.html",
        ),
        (["--out", "folder.html"], "out must be a file, got the folder folder.html"),
        (["--model", "none"], "none"),
        (
            ["--model", "run"],
            "there is no page for run: the page draws images, this model is of the task copy",
        ),
    ],
)
def test_refused(lintra_says, folder, tmp_path, args, reason):
    folder("run", copy.Config())
    (tmp_path / "folder.html").mkdir()
    code, out, err = lintra_says("web", *args)
    assert (code, out) == (2, "")
    assert reason in err
    assert err.count("\n") == 1

"""Which models have a page, and which requests are answered."""

import http.client
import re
import socket
import struct
import threading

import pytest

from lintra import web
from lintra.attention import linear, performer, retention, softmax
from lintra.models import encoder
from lintra.tasks import copy, digits, images
from tests.runtime import recognisers
from tests.web.conftest import small_model


class Wide(type(digits.Config().build())):
    image_shape = (8, 65, 1)


@pytest.mark.parametrize(
    ("task", "attention", "reason"),
    [
        (copy.Config(), linear.Config(), "the page draws images, this model is of the task copy"),
        (images.Config(data="cifar10"), linear.Config(), "grey images, these have 3 channels"),
        (
            digits.Config(),
            performer.Config(),
            "the runtime knows the attentions linear, retention, rfa, gated",
        ),
        (digits.Config(), retention.Config(), "about linear attention, this model has retention"),
        (
            digits.Config(),
            (linear.Config(), softmax.Config()),
            "about linear attention, this model has softmax",
        ),
        (
            digits.Config(),
            (linear.Config(), linear.Config(normalize=False)),
            "reads version 1 of the runtime's files, this model takes version 3",
        ),
    ],
)
def test_models_without_a_page(task, attention, reason):
    task = task.build()
    model, _ = small_model(attention=attention)
    assert reason in (web.why_not(model, task) or "")
    with pytest.raises(ValueError, match="there is no page of this model: "):
        web.page(model, task, "none")


def test_images_that_are_too_large():
    model, _ = small_model()
    assert (
        web.why_not(model, Wide(digits.Config()))
        == "the page draws images of at most 64 x 64 pixels, these have 8 x 65"
    )


def test_the_page_is_whole_and_asks_for_nothing():
    model, task = small_model()
    page = web.page(model, task, "<b>mine</b>")
    assert "{{" not in page
    assert "&lt;b&gt;mine&lt;/b&gt;: 2 layers of width 32" in page
    assert "<mfrac>" in page
    assert not re.findall(r'(?:src|href)="(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)', page)
    plain = small_model(attention=linear.Config(feature_map=linear.Relu(), normalize=False))
    assert "<mfrac>" not in (page := web.page(*plain, "mine"))
    assert "max(<i>x</i>, 0)" in page


def test_the_page_of_a_hybrid_names_its_attentions_and_counts_their_windows():
    sizes = []
    for window in (3, 5):
        attention = (linear.Config(), softmax.Config(window=window))
        shape = encoder.Config(inputs=12, layers=2, heads=3, width=36, causal=True, attention=attention)
        page = web.page(recognisers.build(encoder=shape), None, "mine")
        assert "is linear and softmax: in place of" in page
        sizes.append(int(re.search(r'"state_bytes": (\d+)', page)[1]))
    assert sizes[1] - sizes[0] == 4 * 2 * 2 * 36


@pytest.fixture
def server():
    with web.Server("<p>a page with an é</p>") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_who_is_answered(server):
    whole = (200, "<p>a page with an é</p>")
    assert ask(server) == ask(server, "/?again") == ask(server, host="localhost:1") == whole
    assert ask(server, host="LOCALHOST") == whole
    assert ask(server, method="HEAD") == (200, "")
    assert ask(server, "/other")[0] == 404
    assert ask(server, host="elsewhere.example")[0] == 403
    assert ask(server, method="POST")[0] == 501


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_a_connection_that_is_reset(server, sent, capsys):
    """It leaves no traceback in the terminal, and other connections are answered."""
    finished = threading.Event()
    shutdown_request = server.shutdown_request

    def shutdown(request):
        shutdown_request(request)
        finished.set()

    server.shutdown_request = shutdown
    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close resets
        connection.sendall(sent)
    assert finished.wait(60)
    assert ask(server)[0] == 200
    assert capsys.readouterr() == ("", "")


def test_a_port_in_use(server):
    with pytest.raises(
        OSError, match=rf"port {server.server_port} of 127\.0\.0\.1 is in use; another --port"
    ):
        web.Server("", server.server_port)

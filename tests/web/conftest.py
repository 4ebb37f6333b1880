"""A small model's page, that of the model that comes with lintra, and a browser that reports all requests."""

import base64
import dataclasses
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.browser import launcher, why_not
from lintra import web
from lintra.attention import linear
from lintra.cli.model import open_model
from lintra.export import runtime as export
from lintra.generation.options import Sampler
from lintra.runtime import Model, Sequence
from lintra.tasks import digits


@contextmanager
def serving(page):
    """Serve a page -> its address."""
    with web.Server(page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


class Subject:
    """A model, its task and its page."""

    def __init__(self, model, task):
        self.model, self.task, self.levels = model, task, task.levels
        self.page = web.page(model, task, "subject")
        self.file = export.to_bytes(model, "float16")

    def draw(self, seed, image=0, given=(), temperature=0.9):
        """What the native program draws with the numbers that the page uses for the image."""
        start = self.model.start_token
        given = given if given or start is not None else [0]
        sequence, read = Sequence(Model(self.file)), [*([] if start is None else [start]), *given]
        sequence.prefill(read[:-1])
        sequence.seed(seed | image << 32)
        drawn = list(given)
        while len(drawn) < self.task.length:
            sequence.step(read[-1])
            read.append(sequence.sample(None, Sampler(temperature=temperature)))
            drawn.append(read[-1])
        return drawn


def small_model(**changes):
    torch.manual_seed(0)
    task = digits.Config().build()
    config = task.model(linear.Config())
    shape = {"layers": 2, "heads": 2, "width": 32, "dropout": 0.0} | changes
    model = dataclasses.replace(config, **shape).build().eval()
    for parameter in model.parameters():  # so that attention matters
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model, task


@pytest.fixture(scope="session")
def small():
    """An untrained model that draws 8 x 8 pixels of 17 levels at once."""
    return Subject(*small_model())


@pytest.fixture(scope="session")
def shipped():
    opened = open_model(Path("mnist-small"), "cpu", None)
    return Subject(opened.model, opened.task)


@pytest.fixture(scope="module")  # a process may have one at a time, and other tests have theirs
def launch():
    """Launches the browser of the system; without one, tests that need it are skipped with the reason."""
    if reason := why_not():
        pytest.skip(reason)
    with launcher() as launch:
        yield launch


@pytest.fixture(scope="module")
def chromium(launch):
    return launch()


class Opened:
    """A page in the browser, with its requests and its complaints."""

    def __init__(self, page, levels):
        self.page, self.levels = page, levels
        self.asked, self.complaints = [], []
        page.set_default_timeout(60_000)  # other programs are running
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def says(self, text, where="#status"):
        from playwright.sync_api import expect

        expect(self.page.locator(where)).to_contain_text(text, timeout=60_000)

    def values(self, canvas):
        """The values shown on a canvas: the opacity of its ink."""
        pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
        script = f"c => [...{pixels}].filter((_, i) => i % 4 == 3)"
        return [round(x * (self.levels - 1) / 255) for x in canvas.evaluate(script)]

    def box(self):
        """The place of the visitor's drawing, scrolled into view -> x, y, width, height."""
        canvas = self.page.locator("#own")
        canvas.evaluate("c => c.scrollIntoView({ block: 'center' })")
        box = canvas.bounding_box()
        return box["x"], box["y"], box["width"], box["height"]

    def own(self):
        return self.values(self.page.locator("#own"))

    def images(self):
        return [self.values(canvas) for canvas in self.page.locator("#images canvas").all()]

    def set(self, name, value):
        """Set a slider or field, as if the visitor had moved it."""
        self.page.locator(f"#{name}").fill(str(value))


@pytest.fixture
def opened(chromium, tmp_path):
    """Open a subject's page from a file or an address. It may request nothing else, and must not complain."""
    return opening(chromium, tmp_path)


def opening(browser, folder):
    """Return `opened`, which opens pages in a browser. folder: where their files may be written."""

    @contextmanager
    def open_page(subject, address=None, script=None, page=None, **context):
        if address is None:
            file = folder / "page.html"
            file.write_text(page or subject.page, encoding="utf-8")
            address = file.as_uri()
        within = browser.new_context(**context)
        try:
            if script:
                within.add_init_script(script)
            found = Opened(within.new_page(), subject.levels)
            found.page.goto(address)
            yield found
            assert found.complaints == []
            assert {url for url in found.asked if not url.startswith(("blob:", "data:"))} == {address}
        finally:
            within.close()

    return open_page


def damaged(page, content):
    """The page with one bit of its model's file changed."""
    before = base64.b64encode(content).decode()
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return page.replace(before, base64.b64encode(changed).decode())

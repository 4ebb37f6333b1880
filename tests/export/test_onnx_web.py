"""The example page, with onnxruntime-web in Chromium, draws what onnxruntime draws here."""

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import browser
from lintra.attention import delta, linear
from lintra.export import onnx as export
from tests.export.test_onnx import build, session, start

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXAMPLES = Path(__file__).parents[2] / "examples"
# $ONNXRUNTIME_WEB: the dist folder of the package, if it is not beside the example
DIST = Path(os.environ.get("ONNXRUNTIME_WEB", EXAMPLES / "node_modules" / "onnxruntime-web" / "dist"))
LIBRARY = ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
WIDTH, SEED, TEMPERATURE = 4, 7, 0.8


def why_not():
    if (reason := browser.why_not()) is not None:
        return reason
    if missing := [name for name in LIBRARY if not (DIST / name).is_file()]:
        return f"there is no {DIST / missing[0]}: npm install --prefix examples onnxruntime-web@1.30.0"
    return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging each request."""

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """A folder with the page and the library, and the address where it is served."""
    shutil.copy(EXAMPLES / "draw_onnx.html", tmp_path)
    for name in LIBRARY:
        shutil.copy(DIST / name, tmp_path)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}/draw_onnx.html?library=ort.wasm.min.mjs"
        server.shutdown()
        thread.join()


def random(seed):
    """The numbers in [0, 1) that the page draws (mulberry32)."""
    while True:
        seed = (seed + 0x6D2B79F5) & 0xFFFFFFFF
        t = (seed ^ seed >> 15) * (seed | 1) & 0xFFFFFFFF
        t ^= (t + ((t ^ t >> 7) * (t | 61) & 0xFFFFFFFF)) & 0xFFFFFFFF
        yield (t ^ t >> 14) / 2**32


def drawn(content, kept):
    """The values that onnxruntime draws here, following `kept`."""
    runner, numbers, values = session(content), random(SEED), list(kept)
    state, read = start(runner, 1), [5, *kept]
    while len(values) < WIDTH * WIDTH:
        for token in read:
            params, *after = runner.run(None, {"tokens": np.array([[token]]), **state})
            state = dict(zip(state, after, strict=True))
        noise = [-np.log(-np.log(next(numbers))) for _ in range(5)]
        values.append(int(np.argmax(params[0, -1] / TEMPERATURE + noise)))
        read = values[-1:]
    return values


def pixels(page):
    """The values shown on the page."""
    grey = page.evaluate(
        "() => { const canvas = document.getElementById('image'), { width, height } = canvas;"
        " return [...canvas.getContext('2d').getImageData(0, 0, width, height).data]; }"
    )
    return [round(x * 4 / 255) for x in grey[::4]]


def finished(page):
    """Wait until a drawing is finished. Raise AssertionError with the message of the page if it fails."""
    page.wait_for_function("!/^Loading|^$/.test(document.getElementById('status').textContent)")
    said = page.text_content("#status")
    assert said.startswith("Drawn in"), said
    return said


@pytest.mark.parametrize(
    ("attention", "target", "forms"),
    [
        (linear.Config(), {}, ("step", "parallel")),
        (delta.Config(), {}, ("step",)),
        (delta.Config(), {"domain": "com.microsoft"}, ("step", "parallel")),
    ],
)
def test_the_page_draws_what_is_drawn_here(site, attention, target, forms):
    folder, url = site
    model = build(attention=attention, layers=1, position="none")
    for form in forms:
        export.write(model, folder / f"m-{form}.onnx", form, **target)
    files = {form: f"m-{form}.onnx" for form in forms}
    export.write_description(model, folder / "m-onnx.json", files, **target)
    content = (folder / "m-step.onnx").read_bytes()
    with browser.launched() as chromium:
        page = chromium.new_page()
        page.goto(f"{url}&model=m-onnx.json&width={WIDTH}")
        finished(page)
        page.fill("#temperature", str(TEMPERATURE))
        page.fill("#seed", str(SEED))
        for button, half in (("#draw", 0), ("#continue", WIDTH * WIDTH // 2)):
            kept = pixels(page)[:half]
            page.evaluate("() => { document.getElementById('status').textContent = ''; }")
            page.click(button)
            assert ("kept values" in finished(page)) == bool(half)
            assert pixels(page) == drawn(content, kept)


def test_the_page_says_what_is_missing(site):
    folder, url = site
    model = build(layers=1)
    export.write(model, folder / "new-step.onnx", "step", opset=27)
    export.write_description(model, folder / "new-onnx.json", {"step": "new-step.onnx"}, opset=27)
    with browser.launched() as chromium:
        page = chromium.new_page()
        for name, said in (
            ("none-onnx.json", "none-onnx.json is not there: lintra export --to onnx writes it"),
            ("new-onnx.json", "new-step.onnx cannot be read: export with --opset 20"),
        ):
            page.goto(f"{url}&model={name}")
            page.wait_for_function("document.getElementById('status').textContent.startsWith('It failed')")
            assert said in page.text_content("#status")

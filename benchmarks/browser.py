"""Chromium through Playwright, if both are installed, and steps of the runtime in a worker of it."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lintra import web

_NAMES = ("chromium", "chromium-browser", "google-chrome")

# Opens the files that two inputs hold, and reads tokens from a fresh sequence.
_WORKER = """
const opened = {}, content = async (file) => new Uint8Array(await file.arrayBuffer());
onmessage = async ({ data: { name, files, tokens } }) => {
  try {
    if (files) {
      const lrt = await WasmModel.compile(await content(files[0]));
      opened[name] = new WasmModel(lrt, await content(files[1]), name);
    }
    else {
      const sequence = opened[name].sequence();
      for (const token of tokens) sequence.step(token);
      opened[name].release(sequence);
    }
    postMessage("");
  } catch (error) {
    postMessage(String(error));
  }
};
"""
_CONNECT = """(program) => {
  const worker = new Worker(URL.createObjectURL(new Blob([program], { type: "text/javascript" })));
  globalThis.ask = (message) => new Promise((go, fail) => {
    worker.onmessage = ({ data }) => (data ? fail(new Error(data)) : go());
    worker.onerror = (event) => fail(new Error(event.message));
    worker.postMessage(message);
  });
  globalThis.file = (input, i) => document.getElementById(input).files[i];
}"""
_OPEN = "([name, i]) => ask({ name, files: [file('program', 0), file('models', i)] })"
_STEP = "([name, tokens]) => ask({ name, tokens })"


def why_not() -> str | None:
    """Return why no browser can be started here; None if one can."""
    if _chromium() is None:
        return "there is no Chromium to open pages with: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401 (whether it is installed)
    except ImportError:
        return "there is no playwright: pip install 'lintra[dev]'"
    return None


def _chromium() -> str | None:
    """The browser named by $CHROMIUM, or that of the system."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def launcher() -> Iterator[Callable[..., Any]]:
    """Give a function that launches a browser with arguments of its command line, any number of times.

    A process may have one such at a time; all browsers are closed in the end."""
    from playwright.sync_api import sync_playwright

    browsers = []
    with sync_playwright() as playwright:

        def launch(*args: str) -> Any:
            path = _chromium()
            browsers.append(playwright.chromium.launch(executable_path=path, args=["--no-sandbox", *args]))
            return browsers[-1]

        yield launch
        for browser in browsers:
            browser.close()


@contextmanager
def launched() -> Iterator[Any]:
    """A browser that is closed at the end."""
    with launcher() as launch:
        yield launch()


def stepper(browser: Any, program: Path, models: dict[str, Path]) -> Callable[[str, list[int]], object]:
    """Return what takes tokens through a model, by its name, from a fresh sequence, and returns when all are
    read.

    program: the runtime in WebAssembly, which runs as on the page of `lintra web`.
    """
    page = browser.new_page()
    page.set_content("<input type=file id=program><input type=file id=models multiple>")
    page.set_input_files("#program", program)
    page.set_input_files("#models", list(models.values()))
    page.evaluate(_CONNECT, web.file("runtime.js") + _WORKER)
    for i, name in enumerate(models):
        page.evaluate(_OPEN, [name, i])
    return lambda name, tokens: page.evaluate(_STEP, [name, tokens])

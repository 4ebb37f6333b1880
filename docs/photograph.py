"""Writes docs/pictures/web.png: the page of `lintra web`, with an example completed, as Chromium shows it.

python docs/photograph.py
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import launched
from lintra import web
from lintra.cli.model import open_model

EXAMPLE = 3  # the third shows two digits with the same upper half


def photograph(page: str) -> bytes:
    """The upper part of a page, which must be one file, as PNG."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        tab = browser.new_page(viewport={"width": 1280, "height": 1320}, reduced_motion="reduce")
        tab.goto(file.as_uri())
        for _ in range(EXAMPLE):
            expect(tab.locator("#go")).to_be_enabled()
            tab.click("#example")
        expect(tab.locator("#status")).to_contain_text("Finished", timeout=60_000)
        return tab.screenshot()


def main() -> None:
    content = photograph(web.page(*open_model(Path("mnist-small"), "cpu", None), "mnist-small"))
    colours = Image.open(io.BytesIO(content)).convert("RGB").quantize(64)
    colours.save(Path(__file__).parent / "pictures" / "web.png", optimize=True)


if __name__ == "__main__":
    main()

"""Writes docs/pictures/web.png and web-speech.png: the pages of `lintra web` as Chromium shows them.

On the first an example is completed, on the second three recordings are transcribed.

python docs/photograph.py
"""

import io
import sys
import tempfile
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import expect

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.browser import launched
from lintra import checkpoint, web
from lintra.cli.model import open_model

ROOT = Path(__file__).parents[1]
EXAMPLE = 3  # the third shows two digits with the same upper half
SAID = [ROOT / "tests/speech/data" / f"{name}.wav" for name in ("3_theo_0", "7_jackson_1", "0_nicolas_2")]


def photograph(page: str, height: int, use: Callable[[Any, Path], None]) -> bytes:
    """Return the upper part of a page, which must be one file, as PNG. use: what a visitor does on the page,
    given the browser's tab and a folder."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        tab = browser.new_page(viewport={"width": 1280, "height": height}, reduced_motion="reduce")
        tab.goto(file.as_uri())
        use(tab, Path(folder))
        expect(tab.locator("#status")).to_contain_text("Finished", timeout=60_000)
        return tab.screenshot()


def complete_an_example(tab: Any, _folder: Path) -> None:
    for _ in range(EXAMPLE):
        expect(tab.locator("#go")).to_be_enabled()
        tab.click("#example")


def hear_recordings(tab: Any, folder: Path) -> None:
    file = folder / "said.wav"
    with wave.open(str(file), "wb") as joined:
        for i, each in enumerate(3 * SAID):
            with wave.open(str(each), "rb") as part:
                if i == 0:
                    joined.setparams(part.getparams())
                joined.writeframes(part.readframes(part.getnframes()))
    expect(tab.locator("#file")).to_be_enabled()
    tab.set_input_files("#file", file)


def save(content: bytes, name: str) -> None:
    colours = Image.open(io.BytesIO(content)).convert("RGB").quantize(64)
    colours.save(Path(__file__).parent / "pictures" / name, optimize=True)


def main() -> None:
    drawing = web.page(*open_model(Path("mnist-small"), "cpu", None), "mnist-small")
    save(photograph(drawing, 1320, complete_an_example), "web.png")
    hearing = web.page(checkpoint.load("spoken-digits"), None, "spoken-digits")
    save(photograph(hearing, 1080, hear_recordings), "web-speech.png")


if __name__ == "__main__":
    main()

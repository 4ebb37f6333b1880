"""The reference shows the constructor arguments of every public class."""

import os
import re
import runpy
import subprocess
import sys
from html import unescape
from pathlib import Path
from pydoc import locate

import pytest

from lintra import attention, generation, models, nn

ROOT = Path(__file__).parents[1]
FIELDS, HOOKS = (runpy.run_path(str(ROOT / "docs" / f"{name}.py")) for name in ("fields", "hooks"))
MECHANISMS = [attention.mechanism(name) for name in attention.names()]
LAYERS = [kind for kind in map(vars(nn).get, nn.__all__) if isinstance(kind, type)]
# Packages whose classes are all in the reference.
PACKAGES = (attention, generation, models, nn)


class Base:
    def __init__(
        self,
        first: int,
        *,
        second: "list[int] | None" = None,  # of the base | told
        third: str = "# none",  # of both
    ):
        """Take no notice."""


class Derived(Base):
    def __init__(self, first: float, *, own=(), third: str = "x", **others):
        super().__init__(int(first), third=third, **others)


def test_comments_of_arguments_reach_the_reference(monkeypatch):
    """The arguments of a class come first, then those that it passes on."""
    for kind in (Base, Derived):
        monkeypatch.setattr(kind, "__module__", "lintra.here")
    assert FIELDS["arguments"](Base).splitlines()[2:] == [
        "| `first` | `int` |  |  |",
        r"| `second` | `'list[int] \| None'` | `None` | of the base \| told |",
        "| `third` | `str` | `'# none'` | of both |",
    ]
    assert [row.split(" | ")[0] for row in FIELDS["arguments"](Derived).splitlines()[2:]] == [
        *("| `first`", "| `own`", "| `third`", "| `second`")
    ]


@pytest.mark.parametrize("kind", [*LAYERS, *MECHANISMS], ids=lambda kind: kind.__name__)
def test_every_argument_of_a_layer_has_a_meaning(kind):
    table = FIELDS["table"](kind) if hasattr(kind, "__dataclass_fields__") else FIELDS["arguments"](kind)
    rows = [row.replace(r"\|", "").strip("| ").split(" | ") for row in table.splitlines()[2:]]
    told = {row[0].strip("`"): row[-1] for row in rows if len(row) == 4}
    own = HOOKS["arguments_of"](kind)
    assert set(own) - {"shape"} <= told.keys(), "an argument has no comment"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_shows_every_constructor(site):
    """The signature of each public class, with all arguments, is on the page of its package."""
    shown = {}
    for page in site.rglob("*.html"):
        for heading in re.split(r'(?=<h\d id="[^"]*" class="doc doc-heading">)', page.read_text())[1:]:
            if "doc-class-name" in heading.partition("</h")[0]:
                signature = re.search(r"doc-signature.*?<pre>(.*?)</pre>", heading, re.S)
                code = unescape(re.sub("<[^>]+>", "", signature[1])) if signature else ""
                shown[heading.split('"', 2)[1]] = re.findall(r"\w+", code)
    found = {name: locate(name) for name in shown}
    for name, kind in found.items():
        if isinstance(kind, type) and "others" not in shown[name]:  # those of another package
            missing = set(HOOKS["arguments_of"](kind)) - set(shown[name])
            assert not missing, name
    named = [vars(package).get(name) for package in PACKAGES for name in package.__all__]
    public = {x for x in named if isinstance(x, type) and x.__module__.startswith("lintra.")}
    hidden = public - set(found.values())
    assert not hidden, "public, and in no page of the reference"
    page = (site / "reference" / "nn.html").read_text()
    for argument in ("rope_base", "attention", "batch_first"):
        assert f"<code>{argument}</code>" in page


@pytest.mark.slow
def test_the_first_page_says_how_to_install_and_to_begin(site):
    page = unescape(re.sub("<[^>]+>", "", (site / "index.html").read_text()))
    for text in ("pip install", "lintra train", "generate(model", "decoder.Config("):
        assert text in page

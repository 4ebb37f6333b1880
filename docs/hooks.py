"""Additions to the site: its menu, the API of each mechanism, and links out of the folder."""

import inspect
import posixpath
import re
from pathlib import Path
from pydoc import locate
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from lintra import attention

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"


def on_config(config: Any) -> Any:
    """Make the menu follow the folders, so that it has the page of a new mechanism. By mkdocs.yml, any other
    page that is not in the menu is an error."""
    config.nav = [
        {"Home": "README.md"},
        {"Quick start": "quickstart.md"},
        {"Gallery": "gallery.md"},
        {"Using": "using.md"},
        {"Features": "expectations.md"},
        {"Choosing": "choosing.md"},
        {"Mechanisms": [{name: f"mechanisms/{name}.md"} for name in attention.names()]},
        {"Adding a mechanism": "adding.md"},
        {"Conformance": "conformance.md"},
        {"Hugging Face": "huggingface.md"},
        {"Text": "text.md"},
        {"Data": "data.md"},
        {"Speech": "speech.md"},
        {"Series": "series.md"},
        {"Pretrained encoders": "pretrained-encoders.md"},
        {"Scale": "scale.md"},
        {"Export": "export.md"},
        {"Web": "web.md"},
        {"Format": "format.md"},
        {"Glossary": "glossary.md"},
        {"Coming from": "coming-from.md"},
        {"Migrating": "migrating.md"},
        {"FLA on a CPU": "fla.md"},
        {"Mamba": "mamba.md"},
        {
            "Performance": [
                {"Overview": "performance.md"},
                {"Kernels on a CPU": "performance/kernels.md"},
                {"Generation": "performance/generation.md"},
                {"On a GPU": "performance/gpu.md"},
                {"Missed targets": "performance/targets.md"},
            ]
        },
        {"Decisions": "decisions.md"},
        {"Reference": [{page.stem: f"reference/{page.name}"} for page in sorted(REFERENCE.glob("*.md"))]},
    ]
    return config


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Raise PluginError for a class on the page whose constructor is not shown."""
    for heading in re.split(r'(?=<h\d id="[^"]*" class="doc doc-heading">)', html)[1:]:
        name = heading.split('"', 2)[1]
        kind = locate(name) if "doc-class-name" in heading.partition("</h")[0] else None
        if kind is not None and arguments_of(kind) and "doc-signature" not in heading:
            raise PluginError(f"{page.file.src_path} does not show what {name} is constructed from")
    return html


def arguments_of(kind: Any) -> list[str]:
    """Return the names of the arguments that a class of lintra takes; none for exceptions and protocols."""
    if issubclass(kind, BaseException) or getattr(kind, "_is_protocol", False):
        return []
    given = inspect.signature(kind).parameters.values()
    return [x.name for x in given if x.kind is not x.VAR_POSITIONAL and x.name[0] != "_"]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Bring in pictures from outside docs/, turn links to other files there into the names of those files,
    and append the API of a mechanism."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_path))

    def shown(picture: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, picture[2]))
        if target.startswith("docs/"):
            return picture[0]
        if not (ROOT / target).is_file():
            raise PluginError(f"docs/{page.file.src_path} shows {target}, which does not exist")
        if target not in files.src_uris:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
        return f"{picture[1]}({posixpath.relpath(posixpath.join('docs', target), folder)})"

    def named(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}`)"

    markdown = re.sub(r"(!\[[^\]]*\])\(((?!https?:)[^)#]+)\)", shown, markdown)
    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(((?!https?:)[^)#]+)\)", named, markdown)
    folder, name = posixpath.split(page.file.src_path.removesuffix(".md"))
    if folder == "mechanisms":
        markdown += (
            f"\n\n## API\n\n::: lintra.attention.{name}\n    options:\n      show_root_heading: false\n"
        )
    return markdown

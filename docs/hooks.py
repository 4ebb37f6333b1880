"""What the site adds to the pages: its menu, the API of each mechanism, and links that leave the folder."""

import posixpath
import re
from pathlib import Path
from typing import Any

from lintra import attention

REFERENCE = Path(__file__).parent / "reference"


def on_config(config: Any) -> Any:
    """The menu follows the folders, so that a new mechanism's page is in it."""
    config.nav = [
        {"Reading order": "README.md"},
        {"Choosing": "choosing.md"},
        {"Mechanisms": [{name: f"{name}.md"} for name in attention.names()]},
        {"Adding a mechanism": "adding.md"},
        {"Speech": "speech.md"},
        {"Migrating": "migrating.md"},
        {"Web": "web.md"},
        {"Performance": "performance.md"},
        {"Decisions": "decisions.md"},
        {"Reference": [{page.stem: f"reference/{page.name}"} for page in sorted(REFERENCE.glob("*.md"))]},
    ]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside of docs/ become the names of those files; a mechanism gets its API."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_path))

    def named(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}`)"

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(((?!https?:)[^)#]+)\)", named, markdown)
    name = Path(page.file.src_path).stem
    if name in attention.names() and "/" not in page.file.src_path:
        markdown += (
            f"\n\n## API\n\n::: lintra.attention.{name}\n    options:\n      show_root_heading: false\n"
        )
    return markdown

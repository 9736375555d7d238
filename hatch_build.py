"""Metadata of the distributions that depend on where the repository is published."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)\n*")
_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")


class PublishedMetadata(MetadataHookInterface):
    """The project's URLs, and README.md with images and absolute links. As long as `repository` is empty: neither."""

    def update(self, metadata: dict[str, Any]) -> None:
        files = f"{url}/blob/main" if (url := self.config["repository"]) else None
        link = rf"[\1]({files}/\2)" if files else r"\1"
        image = rf"![\1]({url}/raw/main/\2)\n\n" if url else ""
        readme = _IMAGE.sub(image, (Path(self.root) / "README.md").read_text())
        readme = _RELATIVE_LINK.sub(link, readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
        if files:
            pages = {"Documentation": "docs", "Changelog": "CHANGELOG.md"}
            metadata["urls"] = {"Repository": url, **{name: f"{files}/{page}" for name, page in pages.items()}}

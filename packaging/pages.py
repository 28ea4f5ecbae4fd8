"""Hooks of mkdocs: pages of the site that are outside of docs/, and links that lead there.

The pages stay as GitHub renders them. A link to a file that is not on the site leads to the
repository; a link to a file that does not exist stays as it is, so that `--strict` refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Files of the repository, and what they are on the site.
OUTSIDE = {
    "README.md": "index.md",
    "packaging/site.css": "site.css",
    "benchmarks/results/predicted.md": "predicted.md",
    "benchmarks/results/demo-reward.png": "demo-reward.png",
    "benchmarks/results/scaling-cpu/tokens.png": "tokens.png",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")},
}
PICTURE = re.compile(
    r'<picture><source [^>]*srcset="(.*?)"><img alt="(.*?)" src="(.*?)"></picture>'
)
LINK = re.compile(r"\]\(([^)\s#]+)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files from outside of docs/."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns pictures into Material's pair for light and dark, and links into those of the site."""
    source = {name: source for source, name in OUTSIDE.items()}.get(page.file.src_uri)
    folder = posixpath.dirname(source or f"docs/{page.file.src_uri}")

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if "://" in match[1] or not (ROOT / path).exists():
            return match[0]
        on_site = OUTSIDE.get(path, path.removeprefix("docs/"))
        there = files.get_file_from_path(on_site) and (path in OUTSIDE or path.startswith("docs/"))
        return f"]({on_site if there else f'{config.repo_url}/blob/main/{path}'}"

    markdown = PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    parts = CODE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))

"""Hooks of the documentation's site: pages beside ``docs/`` join it, and links lead within it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# What the search needs where pages are opened as files; the theme would load it from a server.
SHIM = "https://unpkg.com/iframe-worker/shim"
# Pages of the repository that lie elsewhere, by their names in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "tests/conformance/README.md": "conformance.md",
}
SOURCES = {name: source for source, name in OUTSIDE.items()}
WORKER = Path(__file__).with_name("iframe-worker.js")
STYLE = Path(__file__).with_name("extra.css")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
INDENT = re.compile(r"^ {2,3}(?! )")
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")


def github_anchor(heading: str, separator: str) -> str:
    """The anchor of a heading as GitHub makes it, so that links hold at both places."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> None:
    config.mdx_configs["toc"]["slugify"] = github_anchor


def on_files(files: Files, config: Any) -> Files:
    for source, name in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "iframe-worker.js", abs_src_path=str(WORKER)))
    files.append(File.generated(config, "extra.css", abs_src_path=str(STYLE)))
    return files


def nested(markdown: str) -> str:
    """Indent what belongs to an item of a list by four spaces.

    GitHub needs two or three. Python-Markdown would put it behind the list.
    """
    lines = []
    is_item = False
    is_code = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        if ITEM.match(line):
            is_item = True
        elif line and not line.startswith(" "):
            is_item = False
        if is_item and not is_code:
            line = INDENT.sub("    ", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def on_page_content(html: str, **_: Any) -> str:
    """Let the names in narrow cells of tables break behind an underscore, and nowhere else."""

    def breakable(cell: re.Match[str]) -> str:
        return CODE.sub(lambda code: code[0].replace("_", "_<wbr>"), cell[0])

    return CELL.sub(breakable, html)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    return output.replace(SHIM, "iframe-worker.js")


def on_post_template(output: str, template_name: str, **_: Any) -> str:
    return output.replace(SHIM, "iframe-worker.js")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """A link to a file of the repository that is no page of the site becomes its text."""
    name = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(name, f"docs/{name}"))

    def linked(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in OUTSIDE:
            return f"[{text}]({OUTSIDE[path]}{anchor})"
        if path.startswith("docs/") and (ROOT / path).is_file():
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return text

    return nested(LINK.sub(linked, markdown))

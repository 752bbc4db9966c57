"""What mkdocs needs so that one set of pages reads well in the repository and on the site; see mkdocs.yml.

Pages link to files outside docs/ by relative paths, as a reader of the repository needs them. For the site those files are copied
beside the pages, notebooks become pages of their own, and the links follow.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
LINK_OUT = re.compile(r"\]\(\.\./([^)#\s]+)\)")
LINK_OF_NOTEBOOK = re.compile(r"\]\((?:\.\./docs(/[^)\s]+)|([\w-]+)\.ipynb)\)")
FIGURE = re.compile(r"!\[[^\]]*\]\((img/[^)\s]+)\)")
COPIES = "repository"  # folder of the site that holds them


def notebooks() -> list[Path]:
    return sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter the notebooks in the navigation, and the pages that it does not name."""
    nav: list[Any] = list(config.nav or [])
    named = set(re.findall(r"[\w-]+\.md", str(nav)))
    for title, pages in (
        ("Notebooks", [f"notebooks/{path.stem}.md" for path in notebooks()]),
        ("More", sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named)),
    ):
        if pages:
            nav.insert(-1, {title: pages})  # before the reference
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, and every file that a page links to outside docs/."""
    for path in notebooks():
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook_as_markdown(path)))
    wanted = {name for page in Path(config.docs_dir).glob("*.md") for name in LINK_OUT.findall(page.read_text("utf-8"))}
    for name in sorted(wanted):
        path = ROOT / name
        if path.suffix == ".md" or not path.is_file():
            raise PluginError(f"a page of docs/ links to ../{name}, which is no file that the site can hold")
        if path.suffix != ".ipynb":
            files.append(File.generated(config, f"{COPIES}/{name}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links out of docs/ to where the files are on the site; figures open in full size."""
    if page.file.src_uri.startswith("notebooks/"):  # they were turned when they were made
        return markdown
    markdown = FIGURE.sub(lambda match: f"[{match[0]}]({match[1]})", markdown)
    return LINK_OUT.sub(lambda match: f"]({_on_site(match[1])})", markdown)


def _on_site(name: str) -> str:
    return name.removesuffix(".ipynb") + ".md" if name.endswith(".ipynb") else f"{COPIES}/{name}"


def notebook_as_markdown(path: Path) -> str:
    """A notebook's text, code and outputs as one page."""
    parts: list[str] = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(
                LINK_OF_NOTEBOOK.sub(lambda match: f"](..{match[1]})" if match[1] else f"]({match[2]}.md)", source)
            )
            continue
        parts.append(f"```python\n{source}\n```")
        parts += filter(None, map(_output_as_markdown, cell["outputs"]))
    return "\n\n".join(parts) + "\n"


def _output_as_markdown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return _verbatim("".join(output["text"]))
    data = output.get("data", {})
    if "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="output of the cell above" src="data:image/png;base64,{encoded}">'
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    return _verbatim("".join(data.get("text/plain", "")))


def _verbatim(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text.rstrip())}</pre>' if text.strip() else ""

"""The site of the documentation: Sphinx reads this file in `make docs-site`.

The pages are plain Markdown, which a forge shows without Sphinx. The sections of docs/README.md
become the contents of the site, and links to files that are not pages become downloads or text.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT: Final = Path(__file__).parents[1]
INDEX: Final = "docs/README"
DECISIONS: Final = "docs/adr/"
"""Only the index links these pages: they are neither in the sidebar nor in the search."""

project = "gpuledger"
release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
html_title = f"gpuledger {release}"

# The source directory is the repository, because pages link to CONTRIBUTING.md and others in it.
root_doc = INDEX
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "docs"]

extensions = ["myst_parser"]
myst_heading_anchors = 6  # GitHub's anchors, so that one link works on both
smartquotes = False  # they turn two hyphens into a dash
suppress_warnings = ["misc.highlighting_failure"]  # examples with `…` are not valid JSON

html_theme = "furo"
html_copy_source = False
html_show_copyright = False


def sections_of(index: str) -> dict[str, list[str]]:
    """Return the names of the pages that docs/README.md links, by section, each page once."""
    listed: set[str] = set()
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\]\(([^):#]+)\.md[)#]", part)
        paths = ((ROOT / "docs" / link).resolve().relative_to(ROOT) for link in links)
        names = [name for name in dict.fromkeys(map(str, paths)) if name not in listed]
        listed.update(names)
        found[part.splitlines()[0]] = names
    return found


def contents(index: str) -> Iterator[str]:
    """Yield a table of contents for each section of docs/README.md."""
    for section, names in sections_of(index).items():
        entries = [f"/{name}" for name in names if not name.startswith(DECISIONS)]
        if entries:
            yield "\n".join(
                ("", "```{toctree}", ":hidden:", f":caption: {section}", *entries, "```")
            )


def add_contents(_app: Sphinx, name: str, source: list[str]) -> None:
    """Append the contents to the index; mark pages that are not in them."""
    index = (ROOT / f"{INDEX}.md").read_text()
    if name == INDEX:
        source[0] = "\n".join((source[0], *contents(index)))
    elif name.startswith(DECISIONS):
        source[0] = f"---\norphan: true\nnosearch: true\n---\n{source[0]}"
    elif "/" not in name and name not in chain.from_iterable(sections_of(index).values()):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def replace_links(app: Sphinx, tree: nodes.document) -> None:
    """Replace each link to a directory, or to Markdown that is not a page, by its text and path."""
    folder = Path(str(tree["source"])).parent
    for link in list(tree.findall(pending_xref)):
        path = _outside_of_site(app, folder, link.attributes)
        if path:
            shown = [nodes.Text(" ("), nodes.literal(text=path), nodes.Text(")")]
            link.replace_self([*link.children, *([] if path in link.astext() else shown)])


def _outside_of_site(app: Sphinx, folder: Path, link: Mapping[str, Any]) -> str | None:
    if link["refdomain"] == "doc":
        name = link["reftarget"]
        return None if name in app.env.found_docs else f"{name}.md"
    target = (folder / link["reftarget"]).resolve()
    return f"{target.relative_to(ROOT)}/" if target.is_dir() else None


def add_start_page(app: Sphinx, _error: Exception | None) -> None:
    """Make the top of the site lead to its index."""
    refresh = f'<meta http-equiv="refresh" content="0; url={INDEX}.html">'
    page = f'<!doctype html><title>{project}</title>{refresh}<a href="{INDEX}.html">{project}</a>\n'
    (app.outdir / "index.html").write_text(page)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above; Sphinx calls this."""
    app.connect("source-read", add_contents)
    app.connect("doctree-read", replace_links)
    app.connect("build-finished", add_start_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

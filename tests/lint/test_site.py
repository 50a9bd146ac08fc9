"""The site of the documentation: its pages, and how it is built (`make docs-site`)."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typing_extensions import override

from docs.conf import INDEX, sections_of
from tests.lint.prose import MAX_BUDGET_RATIO, ROOT, front_matter, words_by_hand
from tests.tables import for_each

PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.parent.name != "adr" and page != ROOT / f"{INDEX}.md"
]
TYPES = {"tutorial", "how-to", "concept", "reference"}
AUDIENCES = {"SRE", "FinOps", "FinOps analyst", "data engineer", "contributor"}
SAMPLES = {
    "CONTRIBUTING.md": "# Contributing\n",
    "docs/README.md": "# Index\n\n## Start\n\n- [One](one.md): first.\n- [Two](start/two.md)\n",
    "docs/one.md": "---\ntype: concept\n---\n# One\n\n## Its heading, `x`\n\n[Two](start/two.md)\n",
    "docs/start/two.md": "# Two\n\n[One](../one.md#its-heading-x), [data](../../data/), [C][1].\n\n"
    "[1]: ../../CONTRIBUTING.md\n",
    "data/README.md": "# Data\n",
    "data/a.yaml": "a: 1\n",
}


@for_each("page", PAGES)
def test_every_page_states_its_type_its_audience_and_its_budget(page: Path) -> None:
    head = front_matter(page)
    audience = {name.strip() for name in str(head.get("audience")).split(",")}

    assert head.get("type") in TYPES
    assert audience <= AUDIENCES
    assert head.get("generated") is True or isinstance(head.get("budget"), int)
    assert head.keys() <= {"type", "audience", "budget", "generated"}


@for_each("page", PAGES)
def test_no_page_exceeds_its_budget_by_more_than_a_quarter(page: Path) -> None:
    budget = front_matter(page).get("budget")

    assert budget is None or words_by_hand(page) <= MAX_BUDGET_RATIO * budget


def test_every_page_is_in_a_section_of_the_index() -> None:
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES}
    sections = sections_of((ROOT / f"{INDEX}.md").read_text())

    assert pages - {name for names in sections.values() for name in names} == set()


def test_the_words_of_a_page_are_those_written_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("---\nbudget: 3\n---\n# By hand\n<!-- t: begin -->\n\nno\n\n<!-- t: end -->\n")
    assert (front_matter(page), words_by_hand(page)) == ({"budget": 3}, 2)
    page.write_text("---\ngenerated: true\n---\n# No word\n")
    assert words_by_hand(page) == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "html"
    command = ["make", "docs-site", f"SITE={out}"]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


def test_the_site_has_every_page_and_a_search_of_its_own(site: Path) -> None:
    assert {"index.html", "CONTRIBUTING.html", f"{INDEX}.html", "search.html"} <= names_in(site)
    assert {f"{page.relative_to(ROOT).with_suffix('.html')}" for page in PAGES} <= names_in(site)
    assert "Search.setIndex" in (site / "searchindex.js").read_text()


def test_decisions_are_linked_only_by_the_index_and_not_found_by_a_search(site: Path) -> None:
    (decision,) = (site / "docs" / "adr").glob("001-*.html")
    title = "Publish records as JSON"

    assert title in decision.read_text()
    assert title in (site / f"{INDEX}.html").read_text()
    assert title not in (site / "docs" / "guides" / "install.html").read_text()
    assert title not in (site / "searchindex.js").read_text()


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))

    assert pages
    assert styles
    assert [(one.name, url) for one in pages for url in loaded_by(one) if is_remote(url)] == []
    assert [(one.name, url) for one in styles for url in urls_in(one) if is_remote(url)] == []


@pytest.mark.parametrize(
    ("page", "remote"),
    [
        ('<script src="https://example.com/a.js"></script>', ["https://example.com/a.js"]),
        ('<link rel="stylesheet" href="//example.com/a.css">', ["//example.com/a.css"]),
        ('<img src="a.png" srcset="http://example.com/b.png 2x">', ["http://example.com/b.png"]),
        ('<style>@import "https://example.com/a.css"</style>', ["https://example.com/a.css"]),
        ('<a href="https://example.com">elsewhere</a><img src="../a.png">', []),
    ],
)
def test_what_a_page_loads_from_other_hosts_is_found(
    page: str, remote: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.html").write_text(page)

    assert list(filter(is_remote, loaded_by(tmp_path / "a.html"))) == remote


def test_links_work_in_the_site_as_on_a_forge(tmp_path: Path) -> None:
    assert build_samples(tmp_path, {}) == ""

    index = (tmp_path / "html" / f"{INDEX}.html").read_text()
    assert re.search(r'caption-text">Start</span>.*?start/two.html', index, re.DOTALL)
    two = (tmp_path / "html/docs/start/two.html").read_text()
    assert 'href="../one.html#its-heading-x"' in two
    assert 'href="../../CONTRIBUTING.html"' in two
    assert re.search(r"data</span> \(<code[^>]*><span[^>]*>data/</span></code>\)", two)


def test_broken_pages_are_errors(tmp_path: Path) -> None:
    changed = {
        "docs/one.md": "# One\n\n## Another heading\n\n[Four](four.md)\n",
        "docs/three.md": "# Three\n\n```{nosuch}\n```\n",
    }
    errors = build_samples(tmp_path, changed)

    assert re.search(r"two.md.*'its-heading-x'", errors)
    assert re.search(r"one.md.*'four.md'", errors)
    assert re.search(r"three.md.*'nosuch'", errors)
    assert re.search(r"three.md.*isn't included in any toctree", errors)


def build_samples(folder: Path, changed: dict[str, str]) -> str:
    """Build a site of the sample pages into `html`; return its errors."""
    for name in ("docs/conf.py", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name, text in {**SAMPLES, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs"]
    built = subprocess.run(
        [*command, ".", "html"], cwd=folder, check=False, capture_output=True, text=True
    )
    assert bool(built.returncode) == bool(built.stderr), built.stdout
    return built.stderr


def names_in(site: Path) -> set[str]:
    return {str(path.relative_to(site)) for path in site.rglob("*.html")}


def is_remote(url: str) -> bool:
    return re.match(r"\s*(https?:)?//", url) is not None


def urls_in(style: Path | str) -> list[str]:
    """Return the URLs that a style sheet loads."""
    text = style if isinstance(style, str) else style.read_text()
    return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s]+)""", text)


def loaded_by(page: Path) -> Iterator[str]:
    """Yield the URLs that a browser loads for a page; links are not among them."""
    parser = AssetParser()
    parser.feed(page.read_text())
    yield from parser.urls


class AssetParser(HTMLParser):
    """Collects the URLs of scripts, styles, images and frames."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.in_style = False

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_style = tag == "style"
        for name, value in attrs:
            if name in ("src", "data", "poster") or (name == "href" and tag in ("link", "use")):
                self.urls.append(value or "")
            elif name == "srcset":
                self.urls += [one.split()[0] for one in (value or "").split(",")]
            elif name == "style":
                self.urls += urls_in(value or "")

    @override
    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.urls += urls_in(data)

"""Every generated page of docs/ is up to date with the code."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from tests.docs_gen.pages import IN_PART, PAGES, make_page, write_pages

DOCS = Path(__file__).parents[2] / "docs"
MADE = ("\ngenerated: true\n", ": begin -->")


@pytest.mark.parametrize("name", PAGES)
def test_the_committed_page_is_the_generated_one(name: str) -> None:
    assert (DOCS / name).read_text() == make_page(DOCS, name), "run `make docs`"


def test_a_page_that_claims_to_be_generated_is_generated() -> None:
    reports_it = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if any(mark in path.read_text() for mark in MADE)
    }

    assert reports_it == set(PAGES)


def test_every_page_is_generated_over_its_old_content(tmp_path: Path) -> None:
    for name in IN_PART:
        existing = (DOCS / name).read_text().replace(": begin -->", ": begin -->\nold")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(existing)

    write_pages(tmp_path)

    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.md")}
    assert written == {name: (DOCS / name).read_text() for name in PAGES}


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (
            lambda docs: (docs / "reference/agent.md").write_text("# Bare"),
            "reference/agent.md: missing mark <!-- readings",
        ),
        (
            lambda docs: (docs / "reference/agent.md").unlink(),
            "reference/agent.md: No such file",
        ),
        (
            lambda docs: (docs / "reference" / "xids.md").mkdir(parents=True),
            "xids.md: Is a directory",
        ),
    ],
    ids=["no place for the table", "no page", "not a file"],
)
def test_a_page_that_cannot_be_generated_is_named_with_the_problem(
    harm: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    for name in IN_PART:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    harm(tmp_path)

    with pytest.raises(UserError, match=named):
        write_pages(tmp_path)

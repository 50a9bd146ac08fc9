"""Tables with intact rows, and text that is placed between markers."""

import pytest

from gpuledger.errors import UserError
from tests.docs_gen.markdown import code, mark_code, put_between_marks, table
from tests.errors import has_words

PAGE = "# A\n\n<!-- it: begin -->\nold\n<!-- it: end -->\n\nrest\n"


def test_a_table_has_one_line_per_row_under_its_columns() -> None:
    assert list(table(("name", "labels"), [(code("a"), code("b", "c"))])) == [
        "| name | labels |",
        "| --- | --- |",
        "| `a` | `b` `c` |",
    ]


@pytest.mark.parametrize("cell", ["one | two", "one\ntwo"])
def test_a_cell_that_would_break_its_row_is_named_by_row_and_column(cell: str) -> None:
    with pytest.raises(UserError, check=has_words("`a`", "meaning")):
        list(table(("name", "meaning"), [("`b`", "well"), ("`a`", cell)]))


def test_only_text_between_the_markers_is_replaced() -> None:
    made = put_between_marks(PAGE, "it", ["new", "lines"])

    assert made == "# A\n\n<!-- it: begin -->\n\nnew\nlines\n\n<!-- it: end -->\n\nrest\n"
    assert put_between_marks(made, "it", ["new", "lines"]) == made


@pytest.mark.parametrize("mark", ["<!-- it: begin -->", "<!-- it: end -->"])
def test_a_missing_marker_is_named(mark: str) -> None:
    with pytest.raises(UserError, match=mark):
        put_between_marks(PAGE.replace(mark, ""), "it", ["new"])


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("without --yes, only count", "without `--yes`, only count"),
        ("__idle__: not allocated", "`__idle__`: not allocated"),
        ("the DCGM_EXPORTER_ variables", "the `DCGM_EXPORTER_` variables"),
        ("read `--config` and --to", "read `--config` and `--to`"),
        ("a well-known KEY=VALUE", "a well-known KEY=VALUE"),
    ],
)
def test_options_and_special_values_of_a_text_are_marked_as_code(text: str, marked: str) -> None:
    assert mark_code(text) == marked

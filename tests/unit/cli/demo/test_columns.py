"""How a table fits a screen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_cli.demo.tables import TableColumn, cut, fit, line, shorten

COLUMNS = (
    TableColumn("Pod", "left", floor=20),
    TableColumn("Watts"),
    TableColumn("GiB", leaves=2),
    TableColumn("Owner", "left", floor=10, leaves=1),
)
ROW = ["research/llm-finetune-worker-0", "1234567", "80", "PyTorchJob/llm-finetune"]


@pytest.mark.parametrize(
    ("width", "shortened"),
    [
        (30, "research/llm-finetune-worker-0"),
        (24, "research/llm-f…-worker-0"),
        (20, "resear…/llm-…orker-0"),
        (14, "…/llm-…orker-0"),
        (10, "llm…rker-0"),
        (1, "…"),
        (0, ""),
    ],
)
def test_a_shortened_name_keeps_its_namespace_and_its_distinctive_end(
    width: int, shortened: str
) -> None:
    assert shorten("research/llm-finetune-worker-0", width) == shortened


def test_a_text_that_is_identified_by_its_beginning_keeps_it() -> None:
    assert cut("process_utilization", 12) == "process_uti…"
    assert cut("exclusive", 12) == "exclusive"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, ["Pod", "Watts", "GiB", "Owner"]),
        (70, ["Pod", "Watts", "GiB", "Owner"]),
        (40, ["Pod", "Watts", "GiB"]),
        (32, ["Pod", "Watts"]),
        (20, ["Pod", "Watts"]),
    ],
)
def test_the_least_important_columns_are_omitted_first(width: int, shown: list[str]) -> None:
    titles = line(COLUMNS, [column.name for column in COLUMNS], fit(COLUMNS, [ROW], width=width))
    assert titles.split() == shown


@given(width=st.integers(min_value=16, max_value=250), name=st.text("ab-/", max_size=80))
def test_a_line_never_exceeds_the_screen_and_a_number_is_never_cut(width: int, name: str) -> None:
    row = [name, *ROW[1:]]
    drawn = line(COLUMNS, row, fit(COLUMNS, [row], width=width))
    assert len(drawn) <= width
    assert "1234567" in drawn

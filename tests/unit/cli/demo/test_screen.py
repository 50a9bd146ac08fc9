"""What the live table shows of an event."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from cli.demo.screen import draw, rows_of
from cli.demo.tally import Tally
from gpuledger.records import Account, GpuEvent, Method
from tests.unit.cli.demo.events import HELD, KNOWN, PENDING, entry, event


def test_each_entry_has_a_row_in_the_units_people_read() -> None:
    """Percent of the tick, GiB, watts; node and GPU on the first row only."""
    pod, idle = rows_of(event())
    assert tuple(pod)[:-1] == (
        *("node-a", "0", "research/train-0", "Job/train"),
        *("25", "20.0 GiB", "50", "exclusive"),
    )
    assert tuple(idle)[:-1] == ("", "", "(idle)", "", "75", "60.0 GiB", "150", "")


def test_a_pod_without_a_record_is_shown_as_pending_by_its_uid() -> None:
    """It is there at once, and named later."""
    assert next(rows_of(event(pods=[PENDING]))).pod == "pending uid-1"


def test_idle_names_who_held_it() -> None:
    """Each holder has a row; what nobody held, or somebody the event does not list, has no name."""
    idle = [entry(Account.IDLE, 0.5, allocation=one) for one in (0, None, 1)]
    shown = [tuple(row) for row in rows_of(event(entries=idle, allocations=[HELD]))]
    assert [row[2:5] for row in shown] == [
        ("(idle) research/notebook-0", "", "50"),
        ("(idle)", "", "50"),
        ("(idle)", "", "50"),
    ]


def test_what_the_driver_reserved_is_not_worth_a_row() -> None:
    """A host entry without busy seconds and with little memory is left out."""
    reserved = [entry(Account.HOST, 0.0, gib=0.5), entry(Account.IDLE, 1.0)]
    assert [row.pod for row in rows_of(event(entries=reserved))] == ["(idle)"]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_number_is_never_cut_short(width: int) -> None:
    """On a narrow screen names lose their ends, numbers keep theirs."""
    drawn = draw_on(width, event())
    for number in ("25", "20.0 GiB", "50", "75", "60.0 GiB", "150"):
        assert f" {number} " in drawn


LONG_POD = replace(
    KNOWN, name="llm-finetune-worker-0", owner_kind="PyTorchJob", owner_name="llm-finetune"
)


def test_a_method_is_whole_where_people_have_120_columns() -> None:
    """However long the name of whoever holds a GPU idle: that loses its end first."""
    shared = replace(entry(Account.POD, 0.5), method=Method.PROCESS_UTILIZATION)
    idle = entry(Account.IDLE, 0.5, gib=60, joules=150.0, allocation=0)
    held = [replace(HELD, pod="llm-finetune-worker-0")]
    seen = event(node="gpu-node-1", entries=[shared, idle], pods=[LONG_POD], allocations=held)
    lines = draw_on(120, seen).splitlines()
    assert any(
        "process_utilization" in line and "PyTorchJob/llm-finetune" in line for line in lines
    )
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("width", [80, 100, 120])
def test_each_entry_has_one_line(width: int) -> None:
    """What is too long for its column is cut, not wrapped."""
    few, many = (
        draw_on(width, event(pods=[pod], entries=[entry(Account.POD, 0.5)] * 3))
        for pod in (KNOWN, replace(LONG_POD, name="a-pod-with-parts-" * 9))
    )
    assert len(many.splitlines()) == len(few.splitlines())


def draw_on(width: int, *events: GpuEvent) -> str:
    """Draw the events as on a screen of that width."""
    tally = Tally()
    for each in events:
        tally.add(each)
    console = Console(width=width, file=io.StringIO())
    console.print(draw(tally, headline="headline"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_every_node() -> None:
    """In their alphabetical order."""
    drawn = draw_on(140, event(node="node-b"), event(node="node-a"))
    assert drawn.index("headline") < drawn.index("node-a") < drawn.index("node-b")

"""The live table of an event, on screens of any size."""

import pytest
from msgspec.structs import replace

from gpuledger.records import (
    AttributedIncident,
    BusyMethod,
    Category,
    GpuEvent,
    PodDescription,
    PodState,
)
from gpuledger_cli.demo.screen import (
    HELP,
    PAGE_SECONDS,
    ScreenHeader,
    draw,
    draw_last,
    rows_of,
    standstill,
)
from gpuledger_cli.demo.totals import Tally
from tests.unit.cli.demo.events import (
    HELD,
    KNOWN,
    NOTEBOOK,
    PENDING,
    SECOND_NS,
    entry,
    event,
    incident,
)

HEADER = ScreenHeader(facts=["gpuledger demo", "scenario x"])
LONG_POD = replace(
    KNOWN, name="llm-finetune-worker-0", owner_kind="PyTorchJob", owner_name="llm-finetune"
)
NOTEBOOK_LONG = replace(NOTEBOOK, name="llm-finetune-worker-0")


def shared() -> GpuEvent:
    """Return the tick of a GPU that a pod with long names uses partly."""
    used = entry(Category.POD, 0.5, gib=20, joules=50)
    left = entry(Category.IDLE, 0.5, gib=60, joules=150.0, allocation=0)
    return event(
        entries=[used, left],
        pods=[LONG_POD],
        allocations=[HELD],
        notebook=NOTEBOOK_LONG,
        method=BusyMethod.PROCESS_UTILIZATION,
    )


def draw_on(
    width: int,
    *happened: GpuEvent | AttributedIncident,
    header: ScreenHeader = HEADER,
    height: int = 999,
    seconds: float = 0.0,
    with_help: bool = False,
) -> list[str]:
    """Draw the events on a screen of that size; an empty line precedes the line on the help."""
    lines = draw(tally_of(*happened), header, width=width, height=height, seconds=seconds)
    texts = [line.text for line in lines]
    return texts if with_help or "" not in texts else texts[: texts.index("")]


def tally_of(*happened: GpuEvent | AttributedIncident) -> Tally:
    tally = Tally()
    for one in happened:
        if isinstance(one, AttributedIncident):
            tally.gpu_tracker.add_incident(one)
        else:
            tally.add(one)
    return tally


def test_each_entry_has_a_row_in_human_units() -> None:
    """Percent of the tick, GiB, watts; the GPU only on its first row."""
    pod, idle = rows_of(event())
    assert tuple(pod)[:-1] == (
        *("0", "research/train-0", "25", "20.0 GiB", "50", "measured", "Job/train"),
    )
    assert tuple(idle)[:-1] == ("", "__idle__", "75", "60.0 GiB", "150", "", "")


def test_a_pod_without_a_record_is_shown_as_pending_by_its_uid() -> None:
    """It is shown immediately, and with its name later."""
    assert next(rows_of(event(pods=[PENDING]))).pod == "pending uid-1"


def test_idle_rows_name_the_pods_to_which_the_gpu_was_allocated() -> None:
    """Each allocatee has a row; unallocated time and another node's pod have no name."""
    idle = [entry(Category.IDLE, 0.5, allocation=one) for one in (0, None)]
    shown = [row.pod for row in rows_of(event(entries=idle, allocations=[HELD]))]
    assert shown == ["__unused__ research/notebook-0", "__idle__"]
    foreign = PodDescription(state=PodState.FOREIGN)
    (of_foreign, _) = rows_of(event(entries=idle, allocations=[HELD], notebook=foreign))
    assert of_foreign.pod == "__unused__ foreign pod"


def test_memory_reserved_by_the_driver_has_no_row() -> None:
    """A host entry without busy time and with little memory is omitted."""
    reserved = [entry(Category.HOST, 0.0, gib=0.5), entry(Category.IDLE, 1.0)]
    assert [row.pod for row in rows_of(event(entries=reserved))] == ["__idle__"]


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (60, ["GPU", "Pod", "Util", "%", "Memory"]),
        (84, ["GPU", "Pod", "Util", "%", "Memory", "Power", "W", "Source"]),
        (120, ["GPU", "Pod", "Util", "%", "Memory", "Power", "W", "Source", "Workload"]),
        (200, ["GPU", "Pod", "Util", "%", "Memory", "Power", "W", "Source", "Workload"]),
    ],
)
def test_names_come_first_and_the_least_important_columns_are_omitted(
    width: int, titles: list[str]
) -> None:
    lines = draw_on(width, shared())
    assert lines[1].split() == titles
    assert any("research/llm-finetune-worker-0" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_all_names_are_shown_in_full_on_120_columns() -> None:
    drawn = draw_on(120, shared())
    for whole in (
        "measured (shared)",
        "PyTorchJob/llm-finetune",
        "__unused__ research/llm-finetune",
    ):
        assert any(whole in line for line in drawn)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_each_entry_has_one_line_and_no_line_is_wider_than_the_screen(width: int) -> None:
    few, many = (
        draw_on(width, event(pods=[pod], entries=[entry(Category.POD, 0.5)] * 3))
        for pod in (KNOWN, replace(LONG_POD, name="a-pod-with-parts-" * 9))
    )
    assert len(many) == len(few) == 6
    assert max(map(len, many)) <= width


def test_the_table_names_every_node_in_alphabetical_order() -> None:
    lines = draw_on(140, event(node="node-b"), event(node="node-a"))
    assert lines.index("node-a") < lines.index("node-b")


def test_a_lost_gpu_keeps_its_position_and_shows_time_and_cause() -> None:
    happened: list[GpuEvent | AttributedIncident] = [
        event(second=4, gpus=[0, 1, 2]),
        incident("xid", second=4.1, gpu=1, xid=79),
        incident("gpu_lost", second=4.2, gpu=1),
        event(second=5, gpus=[0, 2], unresponsive=[1], allocations=[HELD]),
    ]
    lines = draw_on(100, *happened)
    lost = "  1  __unresponsive__ since 00:00:04 UTC, XID 79, allocated to research/notebook-0"
    assert lost in lines
    assert [line.split()[0] for line in lines if line[:3].strip().isdigit()] == ["0", "1", "2"]


def test_problems_and_alerts_are_above_the_table_and_many_alerts_are_counted() -> None:
    header = ScreenHeader(
        facts=["facts"], problems=["a problem"], alerts=[f"alert {n}" for n in range(9)]
    )
    lines = draw_on(80, event(), header=header)
    shown = [f"! alert {n}" for n in range(4)]
    assert lines[:7] == ["facts", "a problem", *shown, "! and 5 more alerts"]


LONG = (
    "GpuIncident critical  GPU 3 on node gpu-node-2 (pod vision/transcode-6b8f4-9wkzp): XID 79, "
    "GPU has fallen off the bus"
)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_long_alert_is_wrapped_between_words_and_shortened_in_the_middle_on_a_low_screen(
    width: int,
) -> None:
    header = ScreenHeader(facts=["facts"], problems=["a problem " * 9], alerts=[LONG])
    high = draw_on(width, *MANY, header=header)
    first = next(number for number, line in enumerate(high) if line.startswith("! "))
    titles = next(number for number, line in enumerate(high) if line.startswith("GPU"))
    assert " ".join(" ".join(high[first:titles]).split()) == " ".join(f"! {LONG}".split())
    (low,) = (line for line in draw_on(width, *MANY, header=header, height=12) if line[0] == "!")
    assert low == f"! {LONG}" or (low.endswith(" off the bus") and " … " in low)
    assert max(map(len, [*high, low])) <= width


@pytest.mark.parametrize("width", [40, 120])
def test_a_line_names_the_help_if_there_is_room(width: int) -> None:
    lines = draw_on(width, event(), with_help=True)
    assert " ".join(lines[lines.index("") + 1 :]) == HELP
    fits, low = (
        draw_on(width, event(), height=height, with_help=True)
        for height in (len(lines), len(lines) - 1)
    )
    assert fits == lines
    assert low == lines[: lines.index("")]


def test_the_last_sample_has_a_title_and_all_alerts() -> None:
    alerts = [f"alert {number}" for number in range(9)]
    header = ScreenHeader(facts=["facts"], alerts=alerts)
    lines = [line.text for line in draw_last(tally_of(event()), header, width=120)]
    title = lines.index("GPUs in the last sample")
    assert lines[:title] == ["facts", *(f"! {alert}" for alert in alerts), ""]
    assert lines[title + 1 :] == draw_on(120, event())[1:]


@pytest.mark.parametrize(
    ("now_seconds", "message"),
    [(13.0, None), (15.5, "no event for 6 s: the rows are out of date")],
)
def test_outdated_rows_are_marked_as_such(now_seconds: float, message: str | None) -> None:
    """By the newest event of all nodes."""
    tally = Tally()
    assert standstill(tally, now_ns=10**18) is None
    for one in (event(second=4, node="node-b"), event(second=10)):
        tally.add(one)
    assert standstill(tally, now_ns=round(now_seconds * SECOND_NS)) == message


MANY = [event(node=node, gpus=range(20)) for node in ("node-a", "node-b")]


@pytest.mark.parametrize("height", [6, 10, 24, 50])
def test_the_pages_of_a_low_screen_show_every_row(height: int) -> None:
    everything = draw_on(80, *MANY)
    pages = [
        draw_on(80, *MANY, height=height, seconds=PAGE_SECONDS * number) for number in range(100)
    ]
    shown = [line for page in dict.fromkeys(map(tuple, pages)) for line in page]
    assert all(len(page) <= height for page in pages)
    assert len([line for line in shown if "research/train-0" in line]) == 40
    assert set(everything) <= set(shown)
    assert all(page[2] in ("node-a", "node-b") for page in pages)


def test_a_high_screen_has_one_page_and_no_page_number() -> None:
    assert draw_on(80, *MANY, height=84) == draw_on(80, *MANY)
    assert draw_on(80, *MANY, height=83)[-1].startswith("page 1 of 2")


FULL = ScreenHeader(
    facts=["gpuledger demo", "scenario x", "3 events", "3 remote writes", "Ctrl-C ends"],
    problems=["a problem"],
    alerts=[f"alert {number}" for number in range(9)],
)


@pytest.mark.parametrize("width", [30, 40, 80])
@pytest.mark.parametrize("height", range(3, 20))
def test_the_pages_of_the_smallest_screen_show_every_row_and_the_page_number(
    width: int, height: int
) -> None:
    """Whatever the problems and alerts: the lines above the table are omitted first."""
    pages = [
        draw_on(width, *MANY, header=FULL, height=height, seconds=PAGE_SECONDS * number)
        for number in range(100)
    ]
    assert max(map(len, pages)) <= height
    for page in pages:
        assert page[-1].startswith("page ")
        assert any("train-0" in line or "__idle__" in line for line in page)
    rows = [line for page in dict.fromkeys(map(tuple, pages)) for line in page if "train-0" in line]
    assert len(rows) == 40


@pytest.mark.parametrize(
    ("height", "head"),
    [
        (3, []),
        (4, []),
        (5, ["a problem"]),
        (8, ["a problem", "! and 9 more alerts"]),
        (9, ["a problem", "! alert 0", "! and 8 more alerts"]),
        (
            13,
            [
                "gpuledger demo  scenario x",
                "a problem",
                *(f"! alert {one}" for one in range(4)),
                "! and 5 more alerts",
            ],
        ),
    ],
)
def test_on_a_low_screen_problems_precede_alerts_and_both_precede_facts(
    height: int, head: list[str]
) -> None:
    """Alerts without a line are counted."""
    lines = draw_on(30, *MANY, header=FULL, height=height)
    titles = [number for number, line in enumerate(lines) if line.startswith("GPU")]
    assert lines[: titles[0] if titles else 0] == head

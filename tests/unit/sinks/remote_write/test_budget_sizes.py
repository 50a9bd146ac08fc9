"""How many series of a namespace's budget a pod takes, as docs/remote-write.md says it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from gpuledger.keys import node_key
from gpuledger.ledger.series import SeriesGroup
from gpuledger.records import Account, ContainerRequest, EventHolder, GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.namespace_budgets import NamespaceBudgets
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples, NodeIntervals, TickValues
from tests.unit.sinks.builders import SECOND_NS, books, entry, event, pod, reading
from tests.unit.sinks.remote_write.interval_samples import RECORD

PAGE: Final = (Path(__file__).parents[4] / "docs" / "remote-write.md").read_text()
ROW: Final = re.compile(r"^ *\| ([^|]+?) \| (\d+) \| (\d*) ?\| (\d+) \| (\d+) \|$", re.MULTILINE)
SECTION: Final = PAGE.partition("### A budget of series for each namespace")[2].partition("\n### ")[
    0
]
DOCUMENTED: Final = {
    what: tuple(int(number or 0) for number in numbers) for what, *numbers in ROW.findall(SECTION)
}
TICKS: Final = 40
INTERVAL_NS: Final = 15 * SECOND_NS
CHIPS: Final = {
    "sm_active_ratio": 0.25,
    "tensor_active_ratio": 0.1,
    "dram_active_ratio": 0.1,
}
CASES: Final[dict[str, dict[str, Any]]] = {
    "holds its GPU and uses it, or has a process there that does nothing": {},
    "holds its GPU, without a process": {"used_ticks": 0},
    "the same, within ten minutes after its last process": {"used_ticks": 5},
    "uses a GPU that was given to nobody": {"is_held": False},
    "holds and uses one whose chip's counters are read": {"readings": CHIPS},
}


def tick(
    number: int,
    *,
    gpus: int = 1,
    used_ticks: int = TICKS,
    is_held: bool = True,
    readings: dict[str, float] | None = None,
    busy_ns: int = SECOND_NS // 2,
) -> GpuEvent:
    """Return a tick of a pod with one container that asks for its GPUs."""
    asked = {"trainer": ContainerRequest(resources={"nvidia.com/gpu": gpus})}
    used = [entry(busy_ns=busy_ns)] if number < used_ticks else []
    held: dict[str, Any] = {"held_ns": SECOND_NS, "holder": 0} if is_held else {}
    made = event(number, entries=[entry()], pods=[pod(requested=asked)])
    holder = EventHolder(pod=0, container="trainer", resources=["nvidia.com/gpu"])
    return msgspec.structs.replace(
        made,
        gpus=[
            books(
                reading(uuid=f"GPU-{at}", index=at, **readings or {}),
                *used,
                entry(Account.IDLE, **held),
            )
            for at in range(gpus)
        ],
        holders=[holder] if is_held else [],
    )


def samples(interval_ns: int, **case: Any) -> Iterator[IntervalSamples]:  # noqa: ANN401  # as `tick` takes them
    first = tick(0, **case)
    node = NodeIntervals(node_key(first), values=TickValues(), interval_ns=interval_ns)
    for number in range(TICKS):
        for found in node.add(tick(number, **case), RECORD, is_past=False):
            if not found.is_of_incidents:
                yield found


def counted(interval_ns: int, **case: Any) -> tuple[int, int]:  # noqa: ANN401  # likewise
    """Return how many series count by `namespace` and by `holder_namespace` at the end."""
    last = list(samples(interval_ns, **case))[-1]
    used, held = (
        sum(
            sum(value is not None for value in values)
            for group, values in last.values.items()
            if label_of(group, label) == "research"
        )
        for label in ("namespace", "holder_namespace")
    )
    return used, held


def label_of(group: SeriesGroup, label: str) -> str | None:
    return dict(zip(group.family.labels, group.label_values, strict=True)).get(label)


def is_sent(budget: int, **case: Any) -> bool:  # noqa: ANN401  # likewise
    """Return whether nothing of the pod is left out under that budget."""
    series = ActiveSeries(namespaces=NamespaceBudgets({"*": budget}))
    for found in samples(INTERVAL_NS, **case):
        series.encode(found)
    return not series.take_left_out()


def test_every_case_of_the_page_is_measured() -> None:
    assert DOCUMENTED.keys() == CASES.keys()


@pytest.mark.parametrize("what", CASES)
def test_a_pod_has_as_many_series_as_the_page_says(what: str) -> None:
    used, held = counted(INTERVAL_NS, **CASES[what])

    assert DOCUMENTED[what] == (used, held, used + held, sum(counted(0, **CASES[what])))


def test_a_process_that_does_nothing_has_what_one_that_works_has() -> None:
    assert counted(INTERVAL_NS, busy_ns=0) == counted(INTERVAL_NS)


def test_each_further_gpu_adds_what_the_page_says() -> None:
    one, two, eight = (sum(counted(INTERVAL_NS, gpus=gpus)) for gpus in (1, 2, 8))

    assert eight == one + 7 * (two - one)
    assert f"is {two - one} more: a pod with 8 of them has {eight}." in " ".join(SECTION.split())


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_budget_of_so_many_series_is_enough_for_that_pod_and_one_less_is_not(gpus: int) -> None:
    size = sum(counted(INTERVAL_NS, gpus=gpus))

    assert is_sent(size, gpus=gpus)
    assert not is_sent(size - 1, gpus=gpus)

"""Changes of a GPU's health that its readings show without an event."""

from typing import Any

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuDetails, GpuHealth, GpuThrottling
from gpuledger_agent.core.health_changes import (
    HealthChange,
    HealthWatch,
    is_covered_by,
    is_pcie_degraded,
)

SLOWDOWN_SECONDS = 30
WELL = GpuHealth(
    recovery_action="none",
    remapped_rows_pending=False,
    remapped_rows_failed=False,
    sram_threshold_exceeded=False,
    fabric_route_unhealthy=False,
)
FLAGS = {
    "row_remap_failed": "remapped_rows_failed",
    "sram_threshold_exceeded": "sram_threshold_exceeded",
    "page_retirement_pending": "retired_pages_pending",
    "fabric_bandwidth_degraded": "fabric_bandwidth_degraded",
    "fabric_route_recovery": "fabric_route_recovery",
    "fabric_route_unhealthy": "fabric_route_unhealthy",
    "fabric_access_timeout": "fabric_access_timeout",
}
HOT, BRAKED = 0x48, 0x88


class Watched:
    """A GPU whose ticks are evaluated."""

    def __init__(self) -> None:
        self._watch = HealthWatch(slowdown_ns=SLOWDOWN_SECONDS * NS_PER_SECOND)

    def at(self, second: float, health: GpuHealth | None = None, **sent: Any) -> list[HealthChange]:  # noqa: ANN401  # as GpuDetails takes them
        if "reasons" in sent:
            sent["throttling"] = GpuThrottling(reasons=sent.pop("reasons"))
        details = GpuDetails(uuid="GPU-1", health=health, **sent)
        return self._watch.update(details, now_ns=round(second * NS_PER_SECOND))

    def kinds_at(self, second: float, health: GpuHealth | None = None, **sent: Any) -> list[str]:  # noqa: ANN401  # as above
        """Return the kinds that have begun; those that have ended have a minus before them."""
        return [
            name
            for change in self.at(second, health, **sent)
            for name in ([f"-{kind}" for kind in change.ended_kinds] or [change.kind])
        ]


@pytest.fixture
def gpu() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (WELL, WELL, []),
        (WELL, GpuHealth(), []),
        (WELL, GpuHealth(recovery_action="reset"), [("recovery_action", "RESET_GPU")]),
        (
            GpuHealth(recovery_action="reset"),
            GpuHealth(recovery_action="reboot"),
            [("recovery_action", "RESTART_BM")],
        ),
        (GpuHealth(recovery_action="reset"), GpuHealth(recovery_action="reset"), []),
        (
            GpuHealth(recovery_action="reset"),
            GpuHealth(recovery_action="none"),
            [("recovery_action", "NONE")],
        ),
        (
            GpuHealth(remapped_rows_pending=True),
            GpuHealth(remapped_rows_pending=False),
            [("row_remap_done", None)],
        ),
        (GpuHealth(remapped_rows_pending=True), GpuHealth(), []),
        (WELL, GpuHealth(remapped_rows_pending=True), [("row_remap_pending", None)]),
        (WELL, GpuHealth(remapped_rows_failed=True), [("row_remap_failed", None)]),
        (GpuHealth(remapped_rows_failed=True), GpuHealth(remapped_rows_failed=True), []),
    ],
)
def test_a_change_between_two_readings_is_reported(
    gpu: Watched, before: GpuHealth, now: GpuHealth, changes: list[tuple[str, str | None]]
) -> None:
    gpu.at(0, before)
    found = gpu.at(10, now)
    assert [(change.kind, change.action) for change in found] == changes
    assert not any(change.is_at_start for change in found)
    assert gpu.at(20, now) == []


@pytest.mark.parametrize(("kind", "field"), FLAGS.items())
def test_a_state_begins_and_ends_once(gpu: Watched, kind: str, field: str) -> None:
    ill, well = health_with(field, is_so=True), health_with(field, is_so=False)
    gpu.at(0, well)
    reported = [
        gpu.kinds_at(10 * number, sent) for number, sent in enumerate((ill, ill, well, well), 1)
    ]
    assert reported == [[kind], [], [f"-{kind}"], []]


def health_with(field: str, *, is_so: bool) -> GpuHealth:
    sent: dict[str, Any] = {field: is_so}
    return GpuHealth(**sent)


def test_a_missing_reading_ends_nothing(gpu: Watched) -> None:
    gpu.at(0, GpuHealth(recovery_action="reset", remapped_rows_pending=True))
    assert gpu.at(10, GpuHealth()) == []
    assert gpu.at(20) == []
    assert gpu.at(30, GpuHealth(recovery_action="reset", remapped_rows_pending=True)) == []


def test_states_at_the_first_reading_are_reported_as_such_and_others_as_ended(
    gpu: Watched,
) -> None:
    ill = GpuHealth(recovery_action="reset", remapped_rows_failed=True, remapped_rows_pending=False)
    assert gpu.at(0, ill) == [
        HealthChange("recovery_action", "RESET_GPU", is_at_start=True),
        HealthChange("row_remap_failed", is_at_start=True),
        HealthChange("state_ended", is_at_start=True, ended_kinds=("row_remap_pending",)),
    ]
    assert gpu.at(10, WELL, reasons=0) == [
        HealthChange("recovery_action", "NONE"),
        HealthChange(
            "state_ended",
            is_at_start=True,
            ended_kinds=(
                "sram_threshold_exceeded",
                "fabric_route_unhealthy",
                "hardware_thermal_slowdown",
                "power_brake_slowdown",
            ),
        ),
        HealthChange("state_ended", ended_kinds=("row_remap_failed",)),
    ]


def test_only_new_errors_are_reported_not_old_ones_or_those_after_a_reset(
    gpu: Watched,
) -> None:
    reported = [
        gpu.at(10 * number, GpuHealth(ecc_uncorrected_volatile_total=total))
        for number, total in enumerate((5, 5, 7, None, 7, 0, 0, 2))
    ]
    assert [[change.detail for change in found] for found in reported] == [
        [], [], ["2 more, 7 in all"], [], [], [], [], ["2 more, 2 in all"]
    ]  # fmt: skip


def test_links_that_could_not_be_recovered_are_named(gpu: Watched) -> None:
    def failed(**totals: int) -> GpuHealth:
        by_link = {name.removeprefix("l"): total for name, total in totals.items()}
        return GpuHealth(nvlink_link_failed_recoveries_totals=by_link)

    assert gpu.at(0, failed(l0=1, l1=0, l2=4)) == []
    (both,) = gpu.at(10, failed(l0=2, l1=1, l2=0))
    assert (both.kind, both.detail) == ("nvlink_recovery_failed", "links 0, 1")
    (again,) = gpu.at(20, failed(l2=1))
    assert again.detail == "link 2"
    assert gpu.at(30, failed(l0=2, l1=1, l2=1)) == []


@pytest.mark.parametrize(
    ("reasons", "kind"), [(HOT, "hardware_thermal_slowdown"), (BRAKED, "power_brake_slowdown")]
)
def test_a_long_hardware_slowdown_is_reported_and_so_is_its_end(
    gpu: Watched, reasons: int, kind: str
) -> None:
    gpu.at(0, WELL, reasons=0)
    reported = {
        second: gpu.kinds_at(second, reasons=reasons if 10 <= second < 60 else 4)
        for second in range(1, 120)
    }
    assert {second: kinds for second, kinds in reported.items() if kinds} == {
        10 + SLOWDOWN_SECONDS: [kind],
        60 + SLOWDOWN_SECONDS: [f"-{kind}"],
    }


def test_a_slowdown_with_a_break_is_not_long(gpu: Watched) -> None:
    gpu.at(0, WELL, reasons=0)
    for second in range(1, 120):
        assert gpu.kinds_at(second, reasons=0 if second % 20 == 0 else HOT) == []


@pytest.mark.parametrize("pace", [1, 5, 30])
def test_ticks_without_clock_reasons_are_not_a_break(gpu: Watched, pace: int) -> None:
    gpu.at(0, WELL, reasons=0)
    requested: dict[str, Any] = {"reasons": HOT}
    reported = {
        second: gpu.kinds_at(second, **(requested if second % pace == 0 else {}))
        for second in range(1, 120)
    }
    assert {second: kinds for second, kinds in reported.items() if kinds} == {
        pace + SLOWDOWN_SECONDS: ["hardware_thermal_slowdown"]
    }


def test_reasons_from_before_a_long_time_without_reasons_do_not_count(gpu: Watched) -> None:
    gpu.at(0, WELL, reasons=0)
    gpu.at(1, reasons=HOT)
    for second in range(2, 1000):
        gpu.at(second)
    assert gpu.kinds_at(1000, reasons=HOT) == []


def test_reasons_from_before_a_gap_do_not_count_after_it(gpu: Watched) -> None:
    gpu.at(0, WELL, reasons=0)
    gpu.at(1, reasons=HOT)
    assert gpu.kinds_at(1000, reasons=HOT) == []
    assert gpu.kinds_at(1000 + SLOWDOWN_SECONDS, reasons=HOT) == ["hardware_thermal_slowdown"]


def link(generation: int, width: int) -> GpuHealth:
    return GpuHealth(
        pcie_link_generation=generation,
        pcie_link_width=width,
        pcie_max_link_generation=5,
        pcie_max_link_width=16,
    )


def test_a_pcie_link_below_its_capability_is_reported_while_the_gpu_works(gpu: Watched) -> None:
    """The link is read every 10 s; the GPU is idle in the first and the third minute."""
    reported = {}
    for second in range(360):
        is_idle = second < 60 or 120 <= second < 180
        requested = link(5, 16) if second >= 270 else link(1 if is_idle else 4, 16)
        kinds = gpu.kinds_at(
            second,
            requested if second % 10 == 0 else None,
            performance_state=8 if is_idle else 0,
        )
        if kinds:
            reported[second] = kinds
    assert reported == {240: ["pcie_link_degraded"], 330: ["-pcie_link_degraded"]}


def test_a_pcie_link_is_evaluated_with_the_performance_state_read_last(gpu: Watched) -> None:
    """The state is read every 5 s, in other ticks than the link, and later not at all."""
    for second in range(120):
        sent: dict[str, Any] = {"performance_state": 0} if second % 5 == 3 else {}
        kinds = gpu.kinds_at(second, link(1, 16) if second % 10 == 0 else None, **sent)
        assert kinds == (["pcie_link_degraded"] if second == 70 else [])
    for second in range(120, 600):
        assert gpu.kinds_at(second, link(5, 16) if second >= 300 else None) == []


def test_a_pcie_link_that_slows_down_with_an_idle_gpu_is_never_reported(gpu: Watched) -> None:
    for second in range(0, 600, 10):
        works = second % 50 == 0
        state = 0 if works else 8
        assert "pcie_link_degraded" not in gpu.kinds_at(
            second, link(1, 16), performance_state=state
        )


@pytest.mark.parametrize(
    ("sent", "is_degraded"),
    [
        (link(5, 16), False),
        (link(5, 8), True),
        (link(4, 16), True),
        (GpuHealth(), None),
        (GpuHealth(pcie_link_width=8), None),
        (link(0, 0), None),
        (GpuHealth(pcie_link_width=16, pcie_max_link_width=65_535), None),
        (GpuHealth(pcie_link_generation=5, pcie_max_link_generation=255), None),
    ],
)
def test_a_pcie_link_is_compared_with_its_capability_if_both_are_plausible(
    sent: GpuHealth, *, is_degraded: bool | None
) -> None:
    assert is_pcie_degraded(sent) is is_degraded


@pytest.mark.parametrize(
    ("change", "event", "is_covered"),
    [
        (("row_remap_pending", None), ("xid", 63, None), True),
        (("row_remap_pending", None), ("page_retirement_pending", None, None), True),
        (("page_retirement_pending", None), ("page_retirement_pending", None, None), True),
        (("row_remap_pending", None), ("xid", 64, None), False),
        (("row_remap_failed", None), ("xid", 64, None), True),
        (("ecc_uncorrected", None), ("ecc_uncorrected", None, None), True),
        (("ecc_uncorrected", None), ("xid", 48, None), True),
        (("ecc_uncorrected", None), ("xid", 79, None), False),
        (("state_ended", None), ("state_ended", None, None), False),
        (("recovery_action", "RESET_GPU"), ("xid", 154, "RESET_GPU"), True),
        (("recovery_action", "RESET_GPU"), ("xid", 154, "XID_154"), False),
        (("recovery_action", "RESET_GPU"), ("recovery_action", None, None), False),
        (("recovery_action", "RESET_GPU"), ("recovery_action", None, "RESET_GPU"), True),
    ],
)
def test_an_event_with_the_same_content_covers_a_change(
    change: tuple[str, str | None],
    event: tuple[str, int | None, str | None],
    *,
    is_covered: bool,
) -> None:
    kind, xid, action = event
    assert is_covered_by(HealthChange(*change), kind=kind, xid=xid, action=action) is is_covered

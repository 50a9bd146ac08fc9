"""What two readings of a GPU's health say that no event has said."""

import pytest

from agent.core.incidents import HealthChange, changes_of_health, is_covered_by, merge
from gpuledger.records import GpuHealth

WELL = GpuHealth(recovery_action="none", remapped_rows_pending=False, remapped_rows_failed=False)


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        (None, GpuHealth(recovery_action="reset", remapped_rows_failed=True), []),
        (WELL, WELL, []),
        (WELL, GpuHealth(), []),
        (GpuHealth(), GpuHealth(recovery_action="reset", remapped_rows_failed=True), []),
        (WELL, GpuHealth(recovery_action="reset"), [("recovery_action", "RESET_GPU")]),
        (
            GpuHealth(recovery_action="reset"),
            GpuHealth(recovery_action="reboot"),
            [("recovery_action", "RESTART_BM")],
        ),
        (GpuHealth(recovery_action="reset"), GpuHealth(recovery_action="reset"), []),
        (GpuHealth(recovery_action="reset"), WELL, [("recovery_action", "NONE")]),
        (GpuHealth(remapped_rows_pending=True), WELL, [("row_remap_done", None)]),
        (GpuHealth(remapped_rows_pending=True), GpuHealth(), []),
        (WELL, GpuHealth(remapped_rows_pending=True), [("row_remap_pending", None)]),
        (WELL, GpuHealth(remapped_rows_failed=True), [("row_remap_failed", None)]),
        (GpuHealth(remapped_rows_failed=True), GpuHealth(remapped_rows_failed=True), []),
    ],
)
def test_what_has_come_up_or_ended_between_two_readings_is_covered(
    before: GpuHealth | None, now: GpuHealth, changes: list[tuple[str, str | None]]
) -> None:
    assert changes_of_health(before, now) == changes


def test_a_reading_that_says_nothing_takes_nothing_away() -> None:
    kept = merge(merge(None, WELL), GpuHealth(remapped_rows_pending=True))

    assert kept == GpuHealth(
        recovery_action="none", remapped_rows_pending=True, remapped_rows_failed=False
    )


@pytest.mark.parametrize(
    ("change", "event", "is_covered"),
    [
        (("row_remap_pending", None), ("xid", 63, None), True),
        (("row_remap_pending", None), ("page_retirement_pending", None, None), True),
        (("row_remap_pending", None), ("xid", 64, None), False),
        (("row_remap_failed", None), ("xid", 64, None), True),
        (("recovery_action", "RESET_GPU"), ("xid", 154, "RESET_GPU"), True),
        (("recovery_action", "RESET_GPU"), ("xid", 154, "XID_154"), False),
        (("recovery_action", "RESET_GPU"), ("recovery_action", None, None), False),
        (("recovery_action", "RESET_GPU"), ("recovery_action", None, "RESET_GPU"), True),
    ],
)
def test_an_event_that_said_as_much_is_enough(
    change: tuple[str, str | None],
    event: tuple[str, int | None, str | None],
    *,
    is_covered: bool,
) -> None:
    kind, xid, action = event
    assert is_covered_by(HealthChange(*change), kind=kind, xid=xid, action=action) is is_covered

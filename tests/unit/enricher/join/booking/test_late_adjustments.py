"""A late adjustment books only unattributed time on an ended process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.records import (
    BusyMethod,
    Category,
    ContainerRef,
    Entry,
    LateAdjustment,
    ProcessExit,
)
from gpuledger.records.bounds import MAX_DURATION_NS
from gpuledger_enricher.join.booking.late_adjustments import (
    LIFETIME_PARTS,
    adjust_ends,
    unbooked_ns,
)
from tests.unit.enricher.join.ticks import SECOND_NS, process_end, sample

HALF_NS = SECOND_NS // 2


def adjusted(*ends: ProcessExit, **changes: object) -> list[LateAdjustment]:
    return adjust_ends(sample(ended_processes=list(ends), **changes)) or []


def test_unattributed_time_moves_to_the_process_and_the_adjustment_sums_to_zero() -> None:
    (made,) = adjusted(process_end())
    assert made.busy_method is BusyMethod.ACCOUNTING
    assert [(one.category, one.container, one.busy_ns) for one in made.entries] == [
        (Category.POD, 1, HALF_NS),
        (Category.UNATTRIBUTED, None, -HALF_NS),
    ]
    assert {(one.memory_bytes, one.energy_millijoules) for one in made.entries} == {(None, None)}


def test_an_adjustment_names_the_process_and_the_ticks() -> None:
    (made,) = adjusted(process_end())
    assert (made.gpu, made.pid, made.started_boottime_ns) == (0, 7, SECOND_NS)
    assert (made.from_seq, made.from_time_ns) == (998, 1_789_999_997 * SECOND_NS)
    assert (made.until_seq, made.until_time_ns) == (1000, 1_790_000_000 * SECOND_NS)


@pytest.mark.parametrize("until_time_ns", [0, 1_700_000_000 * SECOND_NS, 2**63 - 1])
def test_an_end_that_a_clock_puts_far_from_its_tick_is_dated_by_the_tick(
    until_time_ns: int,
) -> None:
    """A clock change must not cost a tick, and no tick may cover more than two days."""
    length_ns = min(3 * SECOND_NS, until_time_ns)
    (made,) = adjusted(
        process_end(from_time_ns=until_time_ns - length_ns, until_time_ns=until_time_ns)
    )
    assert made.until_time_ns == sample().time_ns
    assert made.until_time_ns - made.from_time_ns == length_ns
    assert made.until_seq == 1000


@pytest.mark.parametrize(
    ("changes", "unbooked"),
    [
        ({}, HALF_NS),
        # Nothing is taken from anyone: what others were booked stays theirs.
        ({"reserved_busy_ns": 125}, 0),
        ({"reserved_busy_ns": 125_000_001}, 125_000_001),
        ({"reserved_busy_ns": 0}, 0),
        # Nothing is refunded: the ticks reported more than the account.
        ({"sampled_busy_ns": 750_000_000}, 0),
        ({"sampled_busy_ns": 2 * SECOND_NS}, 0),
        # Half a percent of the lifetime is within the rounding of the account.
        ({"lifetime_ns": 100 * SECOND_NS}, 0),
        ({"lifetime_ns": 100 * SECOND_NS - 1}, HALF_NS),
    ],
)
def test_only_unattributed_time_beyond_rounding_is_adjusted(
    changes: dict[str, object], unbooked: int
) -> None:
    assert unbooked_ns(process_end(**changes)) == unbooked
    assert len(adjusted(process_end(**changes))) == (1 if unbooked else 0)


@pytest.mark.parametrize("container", [None, 0])
def test_a_process_outside_all_containers_is_adjusted_for_the_host(container: int | None) -> None:
    (made,) = adjusted(process_end(container=container), containers=[ContainerRef()])
    assert (made.entries[0].category, made.entries[0].container) == (Category.HOST, None)


@pytest.mark.parametrize(
    "ref", [ContainerRef(job_id="7"), ContainerRef(container_id="c", job_id="7")]
)
def test_a_process_of_a_job_is_adjusted_for_the_job(ref: ContainerRef) -> None:
    (made,) = adjusted(process_end(container=0), containers=[ref])
    owed = made.entries[0]
    assert (owed.category, owed.container, owed.job_id) == (Category.JOB, None, "7")


def test_a_process_of_a_pod_in_a_job_is_adjusted_for_the_pod() -> None:
    (made,) = adjusted(process_end(container=0), containers=[ContainerRef(pod_uid="u", job_id="7")])
    assert (made.entries[0].category, made.entries[0].job_id) == (Category.POD, None)


def test_a_tick_without_late_adjustments_has_none() -> None:
    assert adjust_ends(sample()) is None
    assert adjust_ends(sample(ended_processes=[])) is None
    assert adjust_ends(sample(ended_processes=[process_end(reserved_busy_ns=0)])) is None


@pytest.mark.parametrize("changes", [{"gpu": 1}, {"container": 8}])
def test_a_position_that_is_not_in_the_tick_is_an_error(changes: dict[str, object]) -> None:
    with pytest.raises(IndexError):
        adjusted(process_end(**changes))


lengths = st.integers(0, MAX_DURATION_NS) | st.integers(0, SECOND_NS)


@given(lengths, lengths, lengths, lengths)
def test_an_adjustment_never_exceeds_the_missing_or_the_unattributed_time(
    lived: int, busy: int, ticked: int, unclaimed: int
) -> None:
    end = process_end(
        lifetime_ns=lived,
        busy_ns=busy,
        sampled_busy_ns=ticked,
        reserved_busy_ns=unclaimed,
    )
    found = unbooked_ns(end)
    assert 0 <= found <= min(max(0, busy - ticked), unclaimed)
    assert found == 0 or found * LIFETIME_PARTS > lived
    entries: list[Entry] = [entry for made in adjusted(end) for entry in made.entries]
    assert sum(one.busy_ns or 0 for one in entries) == 0

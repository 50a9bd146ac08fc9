"""Two events of one tick agree in their books to the byte, or say in which field they do not."""

import pytest

from enricher.join.booking.settlement import settle_ends
from enricher.join.replay_diff import Agreement, compare_events
from gpuledger.codec import encode
from gpuledger.records import (
    Account,
    Entry,
    GpuBooks,
    GpuEvent,
    PodDescription,
    PodState,
)
from tests.unit.enricher.join.ticks import CONTAINER_IDS, UIDS, process_end, reading, sample

FIRST, SECOND = CONTAINER_IDS[:2]
ENDED, ENDED_LATER = (sample(ended_processes=[process_end(until_seq=seq)]) for seq in (1000, 2000))


def event(*, busy_ns: int = 500, pods: tuple[PodDescription, ...] = (), **more: object) -> bytes:
    """Return an encoded event of one entry."""
    entry = Entry(account=Account.POD, busy_ns=busy_ns)
    values: dict[str, object] = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot",
        "seq": 7,
        "time_ns": 10**9,
        "interval_ns": 10**9,
        "gpus": [GpuBooks(reading=reading(), entries=[entry])],
        "containers": [],
        "pods": list(pods),
        "allocations": [],
    }
    return encode(GpuEvent(**(values | more)))  # type: ignore[arg-type]  # the names are a GpuEvent's


def pending(uid: str | None = UIDS[0], *containers: str) -> PodDescription:
    """Return the description of a pod whose record has not come."""
    return PodDescription(uid=uid, container_ids=list(containers), state=PodState.PENDING)


def known(*containers: str, **more: object) -> PodDescription:
    """Return the description of the first pod."""
    values: dict[str, object] = {
        "uid": UIDS[0],
        "container_ids": list(containers),
        "state": PodState.KNOWN,
        "namespace": "research",
        "name": "train",
        "labels": {"team": "vision"},
        "container_names": {},
    }
    return PodDescription(**(values | more))  # type: ignore[arg-type]  # the names are its own


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ([pending(UIDS[0], FIRST)], [known(FIRST)]),
        ([pending(None, FIRST)], [known(FIRST)]),
        ([pending(UIDS[0])], [known()]),
        ([pending(None, FIRST), pending(None, SECOND)], [known(FIRST, SECOND)]),
        ([known(FIRST), pending(None, SECOND)], [known(FIRST, SECOND)]),
        ([known(FIRST)], [known(FIRST, container_names={FIRST: "main"})]),
        ([known(FIRST)], [known(FIRST, deleted_time_ns=5)]),
        ([known(FIRST, owner_kind=None)], [known(FIRST, owner_kind="Job")]),
    ],
)
def test_a_description_may_become_more_complete_and_never_less(
    then: list[PodDescription], now: list[PodDescription]
) -> None:
    first, replayed = event(pods=tuple(then)), event(pods=tuple(now))

    assert compare_events(first, replayed).agreement is Agreement.MORE_COMPLETE
    assert compare_events(replayed, first).agreement is Agreement.DIFFERENT
    assert compare_events(first, first).agreement is Agreement.EQUAL


@pytest.mark.parametrize(
    ("then", "now", "field"),
    [
        (event(), event(busy_ns=250), "gpus[0].entries[0].busy_ns"),
        (event(), event(gap_ns=3), "gap_ns"),
        (event(), event(gpus=[]), "gpus"),
        (event(), event(interval_ns=5), "interval_ns"),
        (event(), event().replace(b'["pod",null,500', b'["pod",null,5e2'), "gpus"),
        (
            event(pods=(known(FIRST),)),
            event(pods=(known(FIRST, name="other"),)),
            f"pods[{FIRST}].name",
        ),
        (
            event(pods=(known(FIRST),)),
            event(pods=(known(FIRST, labels={}),)),
            f"pods[{FIRST}].labels",
        ),
        (event(pods=(known(FIRST),)), event(), f"pods[{FIRST}]"),
        (event(), event(pods=(pending(None, FIRST),)), f"pods[{FIRST}]"),
        (
            event(pods=(known(FIRST),)),
            event(pods=(pending(UIDS[0], FIRST),)),
            f"pods[{FIRST}].state",
        ),
    ],
)
def test_what_differs_is_named_by_its_field(then: bytes, now: bytes, field: str) -> None:
    compared = compare_events(then, now)

    assert compared.agreement is Agreement.DIFFERENT
    assert field in [change.field for change in compared.changes]


def test_both_values_of_what_differs_are_told() -> None:
    (change,) = compare_events(event(), event(busy_ns=250)).changes
    assert (change.first, change.replayed) == (500, 250)


def test_what_is_settled_is_a_part_of_the_books() -> None:
    then, now = (event(settlements=settle_ends(tick)) for tick in (ENDED, ENDED_LATER))
    agreement, changes, _ = compare_events(then, now)
    assert agreement is Agreement.DIFFERENT
    assert [one.field for one in changes] == ["settlements[0].until_seq"]
    assert compare_events(then, event()).agreement is Agreement.DIFFERENT


def test_a_holder_may_become_known_and_nobody_else() -> None:
    nobody, first, second = (event(holder_uids=[uid]) for uid in (None, "one", "two"))
    assert compare_events(nobody, first).agreement is Agreement.MORE_COMPLETE
    assert compare_events(event(), first).agreement is Agreement.MORE_COMPLETE
    for then, now in ((first, nobody), (first, second), (first, event())):
        compared = compare_events(then, now)
        assert compared.agreement is Agreement.DIFFERENT
        assert [change.field for change in compared.changes] == ["holder_uids[0]"]


def test_whether_a_nameless_pod_is_pending_or_foreign_is_passed_over() -> None:
    foreign = PodDescription(uid=UIDS[0], container_ids=[FIRST], state=PodState.FOREIGN)
    then, now = event(pods=(pending(UIDS[0], FIRST),)), event(pods=(foreign,))
    assert compare_events(then, now).agreement is Agreement.EQUAL
    assert compare_events(now, then).agreement is Agreement.EQUAL
    assert compare_events(now, event(pods=(known(FIRST),))).agreement is Agreement.MORE_COMPLETE
    assert compare_events(event(pods=(known(FIRST),)), now).agreement is Agreement.DIFFERENT


def test_how_a_tick_came_is_no_part_of_the_books() -> None:
    compared = compare_events(event(late=True), event())

    assert compared == (Agreement.EQUAL, [], True)

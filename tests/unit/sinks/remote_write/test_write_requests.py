"""Which ticks share a request: a rejected one must not take new ones of other nodes with it."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger_sinks.remote_write.active_series import EncodedTick
from gpuledger_sinks.remote_write.wire import TimedSamples
from gpuledger_sinks.remote_write.write_requests import (
    AgeLimits,
    WriteRequest,
    WrittenTick,
    admit,
    split_into_requests,
)
from gpuledger_sinks.settings import RemoteWriteSettings
from gpuledger_sinks.timelines import Timelines
from tests.unit.sinks.builders import SECOND_NS, event


def record_of(offset: int) -> Record:
    return Record("t", 0, offset, 0, None, b"")


def ticks(nodes: str) -> list[WrittenTick]:
    """Return a tick of each node; a capital letter means that its node has sent a later one."""
    return [
        WrittenTick(
            node=node.lower(),
            time_ns=1,
            record=record_of(offset),
            encoded=EncodedTick(
                timed=(TimedSamples(b"", (), ()),), samples=2, is_behind=node.isupper()
            ),
        )
        for offset, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "apart", "together"),
    [
        ("abcd", "", ["abcd"]),
        ("aBcd", "", ["a", "b", "cd"]),
        ("Abc", "", ["a", "bc"]),
        ("abC", "", ["ab", "c"]),
        ("ABC", "", ["a", "b", "c"]),
        ("abab", "", ["abab"]),
        ("abcdef", "", ["abcd", "ef"]),
        ("abcab", "b", ["a", "b", "ca", "b"]),
        ("bb", "b", ["b", "b"]),
        ("", "", []),
    ],
)
def test_ticks_that_may_be_rejected_are_sent_separately_and_all_others_together(
    nodes: str, apart: str, together: Sequence[str]
) -> None:
    requests = split_into_requests(ticks(nodes), max_samples=8, is_apart=lambda node: node in apart)

    assert ["".join(tick.node for tick in request.ticks) for request in requests] == together


def ticks_at(of: list[tuple[int, int, bool]]) -> list[WrittenTick]:
    """Return ticks in the order of their offsets, as a partition delivers them."""
    return [
        WrittenTick(
            node="a",
            time_ns=1,
            record=record_of(offset),
            encoded=EncodedTick(timed=(), samples=samples, is_behind=is_alone),
        )
        for offset, samples, is_alone in sorted(of, key=itemgetter(0))
    ]


_OFFSETS: Final = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), max_size=12
).map(ticks_at)


@given(_OFFSETS)
def test_requests_have_all_ticks_in_order_and_within_the_maximum(
    written: list[WrittenTick],
) -> None:
    requests = list(split_into_requests(written, max_samples=8, is_apart=lambda _: False))

    assert [tick for one in requests for tick in one.ticks] == written
    for request in requests:
        assert len(request.ticks) == 1 or request.samples <= 8
        assert len(request.ticks) == 1 or not any(t.encoded.is_behind for t in request.ticks)


@given(_OFFSETS)
def test_no_offset_of_a_waiting_tick_is_skipped(written: list[WrittenTick]) -> None:
    unsent = [tick.record.offset for tick in written]

    for request in split_into_requests(written, max_samples=8, is_apart=lambda _: False):
        for tick in request.ticks:
            unsent.remove(tick.record.offset)
        assert request.sent_before <= min(unsent, default=10)
    assert not unsent


@pytest.mark.parametrize("nodes", ["ab", "abc", "abcdefg"])
def test_the_halves_of_a_request_have_all_its_ticks_in_order(nodes: str) -> None:
    whole = WriteRequest(ticks=tuple(ticks(nodes)))
    first, second = whole.halves()
    assert (*first.ticks, *second.ticks) == whole.ticks
    assert first.ticks
    assert second.ticks


@pytest.mark.parametrize(
    ("age_seconds", "refusal"), [(-300, None), (-301, "future"), (3_600, None), (3_601, "too_old")]
)
def test_a_tick_is_sent_if_it_is_neither_too_new_nor_too_old(
    age_seconds: int, refusal: str | None
) -> None:
    limits = AgeLimits.of(RemoteWriteSettings(max_future_seconds=300, max_age_seconds=3_600))
    one = event(0)
    (found,) = admit(
        [(record_of(0), one)],
        Timelines(),
        time_ns=one.time_ns + age_seconds * SECOND_NS,
        monotonic_ns=0,
        limits=limits,
    )
    assert found.refusal == refusal


def test_no_age_is_too_old_by_default() -> None:
    assert AgeLimits.of(RemoteWriteSettings()).max_age_ns is None

"""A node has at most `max_series_per_node` series; samples of others are counted and not sent."""

from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.records import EventContainer, GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from tests.unit.sinks.builders import (
    NODE,
    bus,
    dead_letters,
    entry,
    event,
    eventually,
    pod,
    publish,
    running,
)
from tests.unit.sinks.receiver import receiving
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.oracle import Series, parse_compressed
from tests.unit.sinks.remote_write.sending import is_committed, sink
from tests.unit.sinks.remote_write.test_active_series import encode, is_stale, parse_tick

OF_A_POD = 4
"""Series of a pod with one container: its info, and three quantities of the books."""
KEY = f"default/{NODE}"


def pods_event(tick: int, numbers: Iterable[int], *, node: str = NODE) -> GpuEvent:
    """Return a tick of pods with one container each."""
    uids = [f"uid-{number}" for number in numbers]
    made = event(tick, node=node, entries=[entry(container=at) for at in range(len(uids))])
    return msgspec.structs.replace(
        made,
        pods=[pod(uid=uid, name=uid) for uid in uids],
        containers=[EventContainer(pod=at, name="main") for at in range(len(uids))],
    )


def limited(pods: int) -> ActiveSeries:
    """Return series with room for this many pods of a node."""
    return ActiveSeries(max_series=pods * OF_A_POD)


def pods_in(sent: Sequence[Series]) -> set[str | None]:
    return {one.label("pod") for one in sent if one.label("pod") and not is_stale(one)}


def test_a_pod_above_the_limit_is_omitted_completely_and_pods_that_have_started_continue() -> None:
    series = limited(2)
    assert pods_in(encode(series, pods_event(0, [1, 2]))) == {"uid-1", "uid-2"}

    assert pods_in(encode(series, pods_event(1, [3, 1, 2]))) == {"uid-1", "uid-2"}

    assert series.take_left_out() == {KEY: OF_A_POD}
    assert series.take_left_out() == {}


def test_a_pod_that_ends_makes_room_for_the_next() -> None:
    series = limited(1)
    encode(series, pods_event(0, [1]))
    assert pods_in(encode(series, pods_event(1, [1, 2]))) == {"uid-1"}

    assert pods_in(encode(series, pods_event(2, [2]))) == {"uid-2"}


def test_devices_and_other_nodes_have_all_their_series() -> None:
    series = ActiveSeries(max_series=1)
    unlimited = {one.name for one in encode(ActiveSeries(), pods_event(0, []))}

    assert {one.name for one in encode(series, pods_event(0, [1, 2]))} >= unlimited
    limited_by_pods = limited(1)
    encode(limited_by_pods, pods_event(0, range(9)))
    assert pods_in(encode(limited_by_pods, pods_event(0, [9], node="node-b"))) == {"uid-9"}


def test_a_pod_that_has_started_gets_all_its_later_series() -> None:
    series = limited(1)
    encode(series, pods_event(0, [1]))
    one = pods_event(1, [1])
    renamed = msgspec.structs.replace(one.pods[0], name="train-0")

    sent = encode(series, msgspec.structs.replace(one, pods=[renamed, *one.pods[1:]]))

    assert pods_in(sent) == {"train-0"}


def test_a_late_tick_has_the_active_series_and_those_for_which_there_is_room() -> None:
    series = limited(1)
    encode(series, pods_event(5, [1]))

    past = parse_tick(series.encode(samples_of(pods_event(0, [1, 2]), is_past=True)))

    assert pods_in(past) == {"uid-1"}
    assert series.take_left_out() == {KEY: OF_A_POD}


@given(st.lists(st.sets(st.integers(0, 5)), max_size=10), st.integers(1, 6 * OF_A_POD))
def test_the_series_of_pods_never_exceed_the_limit(ticks: list[set[int]], limit: int) -> None:
    series = ActiveSeries(max_series=limit)
    for tick, numbers in enumerate(ticks):
        sent = encode(series, pods_event(tick, sorted(numbers)))
        assert sum(one.label("pod") is not None and not is_stale(one) for one in sent) <= limit


@pytest.mark.parametrize("limit", [0, 10_000])
def test_without_a_limit_or_below_it_everything_is_sent(limit: int) -> None:
    sent = encode(ActiveSeries(max_series=limit), pods_event(0, range(50)))

    assert len(pods_in(sent)) == 50


async def test_samples_above_the_limit_are_counted_and_logged_and_the_rest_is_delivered() -> None:
    on, name = bus(), "gpuledger_sink_remote_write_samples_over_limit_total"
    before = REGISTRY.get_sample_value(name) or 0.0
    await publish(on, pods_event(0, [1]), pods_event(1, [1]))
    with capture_logs() as logs:
        async with receiving() as receiver, running(sink(on, receiver, max_series_per_node=1)):
            await eventually(is_committed(on, 2))
    sent = [one for got in receiver.received for one in parse_compressed(got.body)]

    assert {one.name for one in sent} >= {"gpuledger_gpu_up", "gpuledger_gpu_power_watts"}
    assert pods_in(sent) == set()
    assert (REGISTRY.get_sample_value(name) or 0.0) > before
    (reported,) = [one for one in logs if one["event"] == "remote_write_samples_dropped"]
    assert reported["key"] == KEY
    assert await dead_letters(on) == []

"""A node over its limit of series, on real brokers and a real Prometheus 3."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.parse
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from gpuledger.records import EventContainer
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.real.services import web
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.sinks.builders import SECOND_NS, entry, event, pod

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import Prometheus, PrometheusApi
    from tests.real.sinks.running_sinks import Sink

HOSTS: Final = ("node-a", "node-b", "node-c", "node-d")
INTERVAL_SECONDS: Final = 5
OF_A_POD: Final = 10
"""Series of a pod with one container: its info, three gauges, their maxima, three counters."""
ROOM: Final = 3
"""Number of pods that fit."""
BOUND: Final = ROOM * OF_A_POD + OF_A_POD // 2
"""The limit, with some space left, but not enough for another pod."""
PHASE_TICKS: Final = 20
GAP_SECONDS: Final = 660
"""After this time without use, the counters of deleted pods have ended."""
BUSY: Final = "gpuledger_gpu_busy_seconds_total"
CI: Final = {f"ci-{number}-node-a" for number in range(9)}
"""The pods of the node over its limit."""
OTHERS: Final = {f"{name}-{host}" for name in ("research", "serving") for host in HOSTS[1:]}


def tick_of(number: int, host: str, start_ns: int, pods: Collection[str]) -> GpuEvent:
    """Return a tick of the given pods on this host; each is busy for half of it."""
    here = sorted(name for name in pods if name.endswith(host))
    gap_seconds = GAP_SECONDS if number > 2 * PHASE_TICKS + 1 else 0
    made = event(
        number,
        node=host,
        time_ns=start_ns + (number + gap_seconds) * SECOND_NS,
        entries=[entry(container=at) for at in range(len(here))],
    )
    return msgspec.structs.replace(
        made,
        pods=[pod(uid=name, name=name) for name in here],
        containers=[
            EventContainer(container_id=f"{at:064}", pod=at, name="main") for at in range(len(here))
        ],
    )


def ticks(numbers: Iterable[int], start_ns: int, pods: Collection[str]) -> list[GpuEvent]:
    return [tick_of(number, host, start_ns, pods) for number in numbers for host in HOSTS]


def samples(prometheus: PrometheusApi, promql: str) -> dict[str, list[tuple[float, float]]]:
    """Return the stored samples of an hour, by pod."""
    found = prometheus.query(f"{promql}[1h]")
    return {
        one["metric"]["pod"]: [(float(at), float(value)) for at, value in one["values"]]
        for one in found
    }


def series_of_pods(prometheus: PrometheusApi) -> dict[str, int]:
    """Return the number of series with a pod's name, by pod."""
    query = urllib.parse.urlencode({"match[]": '{pod!=""}'})
    counted: defaultdict[str, int] = defaultdict(int)
    found: list[dict[str, Any]] = prometheus.fetch(f"/api/v1/series?{query}").json()["data"]
    for one in found:
        counted[one["pod"]] += 1
    return dict(counted)


def left_out(sink: Sink) -> float:
    """Return how many samples the sink has left out."""
    page = web.fetch(f"{sink.health}/metrics").body.decode()
    (counted,) = (
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "gpuledger_sink_remote_write_samples_over_limit_total"
    )
    return counted


def named(sink: Sink) -> set[str]:
    """Return the nodes that the log names."""
    lines = [json.loads(line) for line in sink.log.read_text().splitlines() if line[:1] == "{"]
    return {line["key"] for line in lines if line["event"] == "remote_write_samples_dropped"}


async def test_a_node_over_its_limit_is_cut_by_pods_and_its_counters_stay_right(
    broker: Kafka, start_prometheus: Callable[..., Prometheus], start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    prometheus = start_prometheus()
    start_ns = (time.time_ns() // SECOND_NS - 900) // INTERVAL_SECONDS * INTERVAL_SECONDS
    start_ns *= SECOND_NS
    settings = {
        "remote_write__url": prometheus.remote_write_url,
        "remote_write__interval_seconds": str(INTERVAL_SECONDS),
        "remote_write__max_series_per_node": str(BOUND),
        "remote_write__stale_after_seconds": "600",
        "kafka__group_instance_id": "sink-0",
    }

    async def sent_up_to(sink: Sink, pods: Collection[str], *, seconds: float) -> None:
        """Wait until the counters of these pods have reached these seconds."""

        def is_sent() -> bool:
            stored = samples(prometheus, f'{BUSY}{{pod!=""}}')
            return all(name in stored and stored[name][-1][1] >= seconds for name in pods)

        await asyncio.to_thread(sink.wait_until, is_sent, deadline_seconds=120)

    sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    await publish(broker, ticks(range(1, PHASE_TICKS + 2), start_ns, CI | OTHERS))
    await sent_up_to(sink, OTHERS, seconds=PHASE_TICKS / 2)

    intervals = PHASE_TICKS // INTERVAL_SECONDS
    counted = left_out(sink)
    assert counted == intervals * (len(CI) - ROOM) * OF_A_POD
    assert named(sink) == {"default/node-a"}
    whole = series_of_pods(prometheus)
    within = whole.keys() - OTHERS
    assert len(within) == ROOM
    assert whole == dict.fromkeys(within | OTHERS, OF_A_POD)

    # Another sink selects other pods; its counts continue where the first one stopped.
    assert sink.stop(deadline_seconds=120) == 0
    sink = start_sink(REMOTE_WRITE.name, broker, **settings)
    more = range(PHASE_TICKS + 2, 2 * PHASE_TICKS + 2)
    await publish(broker, ticks(more, start_ns, CI | OTHERS))
    await sent_up_to(sink, OTHERS, seconds=PHASE_TICKS)
    cut = sorted(CI - samples(prometheus, f'{BUSY}{{pod!=""}}').keys())[:ROOM]
    assert len(cut) == ROOM

    # Most pods of the node are gone, and there is room for those that were never sent.
    last = 2 * PHASE_TICKS + 2 * PHASE_TICKS
    rest = range(2 * PHASE_TICKS + 2, last + 2)
    await publish(broker, ticks(rest, start_ns, {*cut, *OTHERS}))
    await sent_up_to(sink, {*cut, *OTHERS}, seconds=last / 2)
    assert sink.stop(deadline_seconds=120) == 0

    stored = samples(prometheus, f'{BUSY}{{pod!=""}}')
    for name, found in stored.items():
        values = [value for _, value in found]
        assert values == sorted(values), name
    at_seconds = start_ns / SECOND_NS + last + GAP_SECONDS
    for name in (*cut, *OTHERS):
        assert dict(stored[name])[at_seconds] == last / 2, name
        # Prometheus receives their start time, and has a zero there.
        first_seconds, first = stored[name][0]
        assert (round(first_seconds - start_ns / SECOND_NS), first) == (0, 0.0), name
    # Zeros are where a counter started, not where it is first sent. The nodes advance together
    # before the gap; a pod that ends there frees its room for a later pod.
    alive = Counter(
        at
        for name in CI & stored.keys()
        for at, value in stored[name]
        if value and at <= start_ns / SECOND_NS + 2 * PHASE_TICKS
    )
    assert max(alive.values()) == ROOM

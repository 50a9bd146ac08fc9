"""Over a minute of turnover and sharing, each pod is booked what its kernels used, to 1 %.

On whole GPUs and in instances, along with processes of the host, on several nodes. Whatever is
restarted, repeated or late: agents, workers, ticks, pods.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuledger.bus.protocol import Message
from gpuledger.codec import Decoder
from gpuledger.records import Category, GpuEvent
from gpuledger_enricher.join.replay_diff import EventId
from tests.default_topics import EVENTS
from tests.examples import examples
from tests.unit.enricher.laws.runs import SECOND_NS, Run, runs_in_topics
from tests.unit.enricher.laws.topics import PARTITIONS, Topics
from tests.unit.enricher.laws.workers import WORKERS, Death, Move, PublishPods, Step, Work, Workers
from tests.unit.owners import pod_of

ROUNDING_RATIO: Final = 0.005
"""Half of a percent, because NVML rounds a device's utilization to whole percents."""
COUNTED_RATIO: Final = 0.6e-6
"""Half of the sixth digit of the chip's ratios, plus 0.1 for entries' rounding to nanoseconds."""
WINDOW_SECONDS: Final = 1 / 6
"""NVML averages over this time, and a stretch of ticks begins and ends within a window."""
# Hypothesis warns before it shows such a large counterexample, and would show only the warning.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
_EVENTS: Final = Decoder(topic=EVENTS.name, record=GpuEvent)

partitions = st.sampled_from(PARTITIONS)
steps = st.lists(
    st.one_of(
        st.builds(Work, partitions, st.integers(1, 30), st.sampled_from(Death)),
        st.builds(PublishPods, partitions, st.integers(1, 3)),
        st.builds(Move, partitions, st.integers(0, WORKERS - 1)),
    ),
    max_size=10,
)


def booked(messages: Sequence[Message]) -> list[GpuEvent]:
    """Return each event once, deduplicated by identity as by a reader."""
    events = [_EVENTS.decode(message.value) for message in messages]
    return list(
        {EventId(one.cluster, one.node, one.boot_id, one.seq): one for one in events}.values()
    )


@settings(
    examples(12),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(runs_in_topics, steps)
def test_each_pod_is_booked_what_it_used_to_one_percent_of_the_window(
    given_runs: tuple[list[Run], Topics], given_steps: list[Step]
) -> None:
    runs, in_topics = given_runs
    workers = Workers(in_topics)
    workers.follow(given_steps)
    events = booked(workers.events)

    for run in runs:
        of_node = [event for event in events if event.node == run.node.name]
        covered_seconds = sum(event.interval_ns for event in of_node) / SECOND_NS
        assert covered_seconds == pytest.approx(run.covered_seconds())
        seconds, devices = used_in(of_node)
        one_percent = 0.01 * covered_seconds
        for uid, true_seconds in run.true_seconds().items():
            assert seconds[uid] == pytest.approx(true_seconds, abs=one_percent)
        assert seconds[None] == pytest.approx(run.host_seconds(), abs=one_percent)
        edges_seconds = WINDOW_SECONDS * len(run.stretches)
        for uuid, true_seconds in run.device_seconds().items():
            rounding_seconds = ROUNDING_RATIO * covered_seconds + edges_seconds
            counted_seconds = COUNTED_RATIO * covered_seconds
            bound_seconds = counted_seconds if uuid.startswith("MIG-") else rounding_seconds
            assert devices[uuid] == pytest.approx(true_seconds, abs=bound_seconds)


def used_in(events: Sequence[GpuEvent]) -> tuple[dict[str | None, float], dict[str, float]]:
    """Return the busy seconds of each pod, of the host under `None`, and of each device."""
    seconds: defaultdict[str | None, float] = defaultdict(float)
    devices: defaultdict[str, float] = defaultdict(float)
    for event in events:
        for books in event.gpus:
            for entry in books.entries:
                if entry.category is not Category.IDLE:
                    seconds[pod_of(entry, event)] += (entry.busy_ns or 0) / 1e9
                    devices[books.reading.uuid] += (entry.busy_ns or 0) / 1e9
    return seconds, devices

"""Over a minute of turnover and sharing, each pod is booked what its kernels used, to 1 %.

Whatever is restarted meanwhile, repeated or late: agent, workers, ticks, pods.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enricher.join.replaying.comparison import EventId
from gpuledger.bus.protocol import Message
from gpuledger.codec import Decoder
from gpuledger.records import Account, GpuEvent
from gpuledger.topics import EVENTS
from tests.unit.enricher.laws.runs import GPUS, PLACE, SECOND_NS, Run, runs_in_topics
from tests.unit.enricher.laws.topics import Topics
from tests.unit.enricher.laws.workers import WORKERS, Death, Move, Step, Tell, Work, Workers

ROUNDING_RATIO: Final = 0.005
"""Half of a whole percent: how NVML rounds a device's utilization."""
WINDOW_SECONDS: Final = 1 / 6
"""What NVML averages over: a stretch of ticks begins and ends within one."""
# Hypothesis warns before it shows a counterexample as large as these, and would show the warning.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
_EVENTS: Final = Decoder(topic=EVENTS.name, record=GpuEvent)

steps = st.lists(
    st.one_of(
        st.builds(Work, st.just(PLACE), st.integers(1, 30), st.sampled_from(Death)),
        st.builds(Tell, st.just(PLACE), st.integers(1, 3)),
        st.builds(Move, st.just(PLACE), st.integers(0, WORKERS - 1)),
    ),
    max_size=10,
)


def booked(messages: Sequence[Message]) -> list[GpuEvent]:
    """Give each event once, as a reader that knows their identity counts them."""
    events = [_EVENTS.decode(message.value) for message in messages]
    return list({EventId(one.node, one.boot_id, one.seq): one for one in events}.values())


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(runs_in_topics(), steps)
def test_each_pod_is_booked_what_it_used_to_one_percent_of_the_window(
    given_run: tuple[Run, Topics], given_steps: list[Step]
) -> None:
    run, in_topics = given_run
    workers = Workers(in_topics)
    workers.follow(given_steps)
    events = booked(workers.events)

    covered_seconds = sum(event.interval_ns for event in events) / SECOND_NS
    assert covered_seconds == pytest.approx(
        sum(end_ns - begin_ns for begin_ns, end_ns in run.covered_ns()) / SECOND_NS
    )
    seconds: defaultdict[str | None, float] = defaultdict(float)
    busy = [0.0] * GPUS
    for event in events:
        for books in event.gpus:
            for entry in books.entries:
                if entry.account is not Account.IDLE:
                    seconds[entry.pod_uid] += entry.busy_seconds or 0.0
                    busy[books.reading.index] += entry.busy_seconds or 0.0
    for uid, true_seconds in run.true_seconds().items():
        assert seconds[uid] == pytest.approx(true_seconds, abs=0.01 * covered_seconds)
    assert busy == pytest.approx(
        run.device_seconds(),
        abs=ROUNDING_RATIO * covered_seconds + WINDOW_SECONDS * len(run.stretches),
    )

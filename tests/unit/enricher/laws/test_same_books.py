"""The same records are booked the same, whichever worker reads them and in any order.

However ticks are batched, however many workers share them, whenever one dies or gives a partition
up, and whether pods come before their ticks or after: each tick has one event, whose entries are
identical to those of a replay that reads all pods first.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_cli.replay.range_plan import TimeRange
from gpuledger_cli.replay.run import Replay
from gpuledger_enricher.join.replay_diff import Agreement, EventId, compare_events
from tests.default_topics import TOPICS
from tests.examples import examples
from tests.unit.enricher.join.ticks import anywhere
from tests.unit.enricher.laws.topics import PARTITIONS, Topics, topics
from tests.unit.enricher.laws.workers import WORKERS, Death, Move, PublishPods, Step, Work, Workers

# Hypothesis warns before it shows such a large counterexample, and would show only the warning.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
ALWAYS = TimeRange(0, 2**62)
id_of = msgspec.json.Decoder(EventId).decode

partitions = st.sampled_from(PARTITIONS)
steps = st.lists(
    st.one_of(
        st.builds(Work, partitions, st.integers(1, 5), st.sampled_from(Death)),
        st.builds(Work, partitions, st.integers(1, 5)),
        st.builds(PublishPods, partitions, st.integers(1, 4)),
        st.builds(Move, partitions, st.integers(0, WORKERS - 1)),
    ),
    max_size=12,
)


def replay(given_topics: Topics) -> dict[EventId, bytes]:
    """Return the events of a replay, by identity."""
    again, made = Replay(ALWAYS, is_placed=anywhere, topics=TOPICS), {}
    for partition in PARTITIONS:
        again.take_pods(given_topics.pods[partition])
        for event in again.take_samples(given_topics.samples[partition]):
            made[id_of(event.value or b"")] = event.value or b""
        again.end_partition(partition)
    return made


def ids_in(given_topics: Topics) -> set[EventId]:
    """Return the identity of every tick."""
    return {
        id_of(record.value or b"")
        for records in given_topics.samples.values()
        for record in records
    }


@examples(100)
@given(topics(), steps)
def test_booked_amounts_do_not_depend_on_batches_worker_deaths_or_interleaving(
    given_topics: Topics, given_steps: list[Step]
) -> None:
    workers = Workers(given_topics)
    workers.follow(given_steps)
    expected = replay(given_topics)

    assert {id_of(event.value or b"") for event in workers.events} == ids_in(given_topics)
    assert expected.keys() == ids_in(given_topics)
    for event in workers.events:
        value = event.value or b""
        changes = compare_events(value, expected[id_of(value)]).changes
        assert [each for each in changes if ".pod." not in each.field] == []


@examples(50)
@given(topics(), steps)
def test_without_a_death_each_tick_has_exactly_one_event(
    given_topics: Topics, given_steps: list[Step]
) -> None:
    workers = Workers(given_topics)
    workers.follow(
        [
            Work(step.partition, step.ticks) if isinstance(step, Work) else step
            for step in given_steps
        ]
    )

    seen = [id_of(event.value or b"") for event in workers.events]
    assert len(seen) == len(set(seen))


@examples(50)
@given(topics(), steps)
def test_a_replay_with_all_pods_describes_every_pod_that_the_first_run_described(
    given_topics: Topics, given_steps: list[Step]
) -> None:
    """Labels are those of the tick's time, so a version that came late may change them."""
    workers = Workers(given_topics)
    workers.follow(given_steps)
    expected = replay(given_topics)

    for event in workers.events:
        value = event.value or b""
        compared = compare_events(value, expected[id_of(value)])
        changed = {each.field.rpartition(".")[2] for each in compared.changes}
        assert changed <= {"labels"}
        assert changed or compared.agreement is not Agreement.DIFFERENT

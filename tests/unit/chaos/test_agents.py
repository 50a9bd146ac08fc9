"""The ticks that the agents of a chaos run publish."""

from itertools import pairwise

import pytest

from benchmarks.ticks import Fleet
from gpuledger.codec import Decoder
from gpuledger.keys import key_in, node_key
from gpuledger.records import NodeSample
from gpuledger.topics import partition_of_node
from tests.chaos.agents import Agent, make_agents
from tests.default_topics import SAMPLES

STARTED_NS = 1_800_000_000_000_000_000
UIDS = ["uid-a", "uid-b", "uid-c"]


@pytest.fixture(scope="module")
def agents() -> list[Agent]:
    return make_agents(Fleet(nodes=len(UIDS)), uids=UIDS, partitions=SAMPLES.partitions)


def tick(agent: Agent, number: int) -> NodeSample:
    """Read a tick as the join does."""
    agent.number = number
    value = agent.message(started_ns=STARTED_NS).value
    return Decoder(topic=SAMPLES.name, record=NodeSample).decode(value)


def test_a_nodes_ticks_follow_each_other_without_a_gap(agents: list[Agent]) -> None:
    """By its clock and by `seq`, which is milliseconds since boot; otherwise its clock was set."""
    ticks = [tick(agents[1], number) for number in range(12)]
    assert ticks[0].seq == 0
    for one, next_one in pairwise(ticks):
        assert next_one.time_ns - next_one.interval_ns == one.time_ns
        assert (next_one.seq - one.seq) * 1_000_000 == next_one.interval_ns


def test_a_message_is_placed_where_the_nodes_own_agent_would_put_it(agents: list[Agent]) -> None:
    for agent in agents:
        message = agent.message(started_ns=STARTED_NS)
        assert message.key == node_key(tick(agent, 0)).encode() == f"default/{agent.node}".encode()
        assert agent.partition == partition_of_node(
            key_in("default", agent.node), partitions=SAMPLES.partitions
        )


def test_nodes_tick_at_different_times_within_a_second(agents: list[Agent]) -> None:
    times = [tick(agent, 0).time_ns - STARTED_NS for agent in agents]
    assert times == pytest.approx([0, 1e9 / 3, 2e9 / 3], abs=1)


def test_a_nodes_containers_belong_to_its_pods_or_are_known_only_by_their_id(
    agents: list[Agent],
) -> None:
    for agent, uid in zip(agents, UIDS, strict=True):
        assert {each.pod_uid for each in tick(agent, 0).containers} == {uid, None}

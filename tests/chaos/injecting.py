"""Actions that cause a fault in an installation, and actions that repair it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from gpuledger.bus.administration import create_topics
from gpuledger_enricher.join.join_settings import GROUP as JOIN_GROUP
from tests.default_topics import EVENTS, INVENTORY, SAMPLES, TOPICS
from tests.real.changed_topics import recreate, spans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from gpuledger.topics import Topic
    from tests.chaos.installation import Installation

    Act = Callable[[Installation], Awaitable[None]]

STORE_GROUP: Final = "gpuledger-store"
_GROUPS_TOOL: Final = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
_STANDSTILL_SECONDS: Final = 0.7
_SKIPPED_SECONDS: Final = 6.0
_GONE_SECONDS: Final = 60.0
# An agent compares the topic's id each minute.
_REPUBLISHED_SECONDS: Final = 120.0
_MORE_PARTITIONS: Final = 2 * SAMPLES.partitions


def kill(name: str) -> Act:
    """Return the fault of a killed component."""

    async def act(at: Installation) -> None:
        await at.take(name)

    return act


def bring(name: str) -> Act:
    """Return the start of a killed component."""

    async def act(at: Installation) -> None:
        at.bring(name)

    return act


def pause(name: str) -> Act:
    """Return the fault of a component that hangs."""

    async def act(at: Installation) -> None:
        at.components[name].pause()

    return act


def resume(name: str) -> Act:
    """Return the end of a hang."""

    async def act(at: Installation) -> None:
        at.components[name].resume()

    return act


async def kill_midway(at: Installation) -> None:
    """Kill the join while it waits for a response, so that its request completes without it."""
    at.kafka.process.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(_STANDSTILL_SECONDS)
        await at.take("join")
    finally:
        at.kafka.process.send(signal.SIGCONT)


async def stop_broker(at: Installation) -> None:
    """Stop the broker."""
    await asyncio.to_thread(at.kafka.stop)


async def start_broker(at: Installation) -> None:
    """Start the broker."""
    await asyncio.to_thread(at.kafka.start)


async def stop_api_server(at: Installation) -> None:
    """Stop the API server."""
    await asyncio.to_thread(at.cluster.parts.kube_api.stop_server)


async def start_api_server(at: Installation) -> None:
    """Start the API server."""
    await asyncio.to_thread(at.cluster.parts.kube_api.start)


async def start_second_writer(at: Installation) -> None:
    """Start a second agent on the node, as if the manifests were installed twice."""
    spool = at.folder / "second-spool"
    spool.mkdir()
    at.bring("second-agent", at.make_agent("second-agent", spool=spool))


async def stop_second_writer(at: Installation) -> None:
    """Uninstall the second agent."""
    await at.remove("second-agent")


async def silence_kubelet(at: Installation) -> None:
    """Let the kubelet accept connections without answering."""
    at.kubelet.send(signal.SIGSTOP)


async def resume_kubelet(at: Installation) -> None:
    """Let the kubelet answer."""
    at.kubelet.send(signal.SIGCONT)


def move_offsets(component: str, group: str, topic: Topic) -> Act:
    """Return the fault of a group whose offsets an administrator moves to the end."""

    async def act(at: Installation) -> None:
        await at.stop(component)
        # Records that the group has not read yet, and never will.
        await asyncio.sleep(_SKIPPED_SECONDS)
        arguments = ["--bootstrap-server", at.kafka.bootstrap_servers, "--group", group]
        arguments += ["--topic", topic.name, "--reset-offsets", "--to-latest", "--execute"]
        await asyncio.to_thread(at.kafka.run_tool, _GROUPS_TOOL, *arguments)
        at.bring(component)

    return act


move_join_offsets: Final = move_offsets("join", JOIN_GROUP, SAMPLES)
move_store_offsets: Final = move_offsets("store", STORE_GROUP, EVENTS)


async def grow_partitions(at: Installation) -> None:
    """Add partitions to the topic of samples."""
    async with _admin(at) as admin:
        await admin.create_partitions({SAMPLES.name: NewPartitions(total_count=_MORE_PARTITIONS)})


async def recreate_topics(at: Installation) -> None:
    """Delete and create all topics; the store then requires a new generation."""
    names = {topic.name for topic in TOPICS}
    async with _admin(at) as admin, asyncio.timeout(_GONE_SECONDS):
        await admin.delete_topics(sorted(names))
        # Kafka deletes asynchronously.
        while names & set(await admin.list_topics()):  # noqa: ASYNC110  # brokers send no event
            await asyncio.sleep(0.1)
    await create_topics(at.settings)
    await at.await_end("store", seconds=_GONE_SECONDS)
    await renew_store(at)


async def wipe_broker(at: Installation) -> None:
    """Delete the broker's data, and create the topics as after an installation."""
    await asyncio.to_thread(at.kafka.discard)
    await asyncio.to_thread(at.kafka.start)
    await create_topics(at.settings)


async def renew_store(at: Installation) -> None:
    """Start the store with a new generation, as its message requires."""
    await at.take("store")
    at.bring("store", at.make_store(STORE__GENERATION="second"))


async def lose_inventory(at: Installation) -> None:
    """Delete and create the topic of the inventory."""
    await recreate(at.settings, INVENTORY)


async def await_inventory(at: Installation) -> None:
    """Wait until the agent has published the node's inventory again."""
    async with asyncio.timeout(_REPUBLISHED_SECONDS):
        while not await _has_records(at, INVENTORY):  # noqa: ASYNC110  # it polls the broker
            await asyncio.sleep(1)


def fill(disk: str) -> Act:
    """Return the fault of a full disk."""

    async def act(at: Installation) -> None:
        await asyncio.to_thread(at.disks[disk].fill)

    return act


def free(disk: str) -> Act:
    """Return the end of a full disk."""

    async def act(at: Installation) -> None:
        await asyncio.to_thread(at.disks[disk].free)

    return act


def each(*acts: Act) -> Act:
    """Return several acts, one after another."""

    async def act(at: Installation) -> None:
        for one in acts:
            await one(at)

    return act


async def nothing(at: Installation) -> None:
    """Do nothing: the installation recovers without help."""


async def _has_records(at: Installation, topic: Topic) -> bool:
    return any(span.end > span.first for span in (await spans(at.settings, topic.name)).values())


@asynccontextmanager
async def _admin(at: Installation) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=at.kafka.bootstrap_servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()

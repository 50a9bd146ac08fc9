"""`gpuledger join`: creates and connects the parts that join samples with pods into events."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from gpuledger.bus.gaps import GapCheck
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.bus.transactional_writers import TransactionalWriters
from gpuledger.clock import SystemClock
from gpuledger.completeness import name_publisher
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError
from gpuledger.lag import Lag
from gpuledger.placement import placement_rule
from gpuledger.runtime import (
    Backoff,
    CheckSeverity,
    Readiness,
    RetryingCaller,
    end_where_stalled,
    explain_user_errors,
    run_service,
)
from gpuledger.settings import load_settings
from gpuledger.topics import Topics, agreed_partitions
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.delivery import Delivery
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.join.polling import bus_retry
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.restore import (
    NamespaceDeadLetters,
    NamespaceFollower,
    StateRestorer,
    input_names,
    state_names,
)
from gpuledger_enricher.join.stage import JoinStage
from gpuledger_enricher.join.worker import JoinWorker

# Each caller has its own backoff, because a backoff grows with the failures of its caller.
_new_backoff: Final = partial(Backoff, first_seconds=0.2, max_seconds=10.0)
DESCRIPTION: Final = (
    "Run a worker of the join: it attributes the samples of each GPU to pods and publishes events"
    " whose entries sum to the GPU. Run at most one worker per partition."
)
EXAMPLES: Final = (
    "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS=kafka:9092 gpuledger join",
    "gpuledger join --config join.yaml",
    "gpuledger join --config join.yaml --print-config",
)
COMMON: Final = (
    "kafka.bootstrap_servers",
    "kafka.security_protocol",
    "kafka.sasl_mechanism",
    "kafka.sasl_username",
    "kafka.sasl_password",
    "kafka.ssl_ca_file",
    "kafka.group_instance_id",
    "join.podwatch_timeout_seconds",
    "http.listen",
    "log.level",
)
_FINISH_SECONDS: Final = 0.0
"""Maximum time for a commit in progress to end when its partition is revoked, in seconds. It is 0,
because the group revokes partitions only between deliveries, when no commit is in progress."""


@explain_user_errors
def main() -> int:
    """Run the join until a signal ends it; return the exit code."""
    settings = load_settings(
        JoinSettings,
        prog="gpuledger join",
        description=DESCRIPTION,
        examples=EXAMPLES,
        common=COMMON,
    )
    topics = Topics(settings.kafka.topic_prefix)
    about = {
        "group": topics.group(settings.join.group),
        "group_instance_id": settings.kafka.group_instance_id or None,
        "brokers": settings.kafka.bootstrap_servers,
    }

    async def join(settings: JoinSettings, readiness: Readiness) -> None:
        bus = KafkaBus(settings.kafka, readiness=readiness)
        await run_join(bus=bus, settings=settings, readiness=readiness)

    return run_service(join, settings=settings, about=about)


async def run_join(*, bus: Bus, settings: JoinSettings, readiness: Readiness) -> None:
    """Join until cancelled; wait for missing brokers, topics and permissions.

    Raise `FreshStartError` if no call to Kafka has returned for ten minutes. The checks:

    - `kafka` is ok while the brokers answer.
    - `pods` is ok once the pods of the assigned partitions have been read.
    - `delivery` is ok while results can be published.
    - `namespaces`, a warning, is ok while namespaces can be followed.
    """
    settings = _in_group_of(bus.topics, settings)
    metrics.count_topics_from_zero(bus.topics)
    stage_check, delivery_check = readiness.check("pods"), readiness.check("delivery")
    retry = bus_retry(check=readiness.check("kafka"), backoff=_new_backoff)
    following = bus_retry(
        check=readiness.check("namespaces", severity=CheckSeverity.WARNING), backoff=_new_backoff
    )

    def attempts() -> int:
        return retry.attempts + following.attempts

    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(end_where_stalled(attempts, what="the join"))
        inputs, dead_letter_partitions = await retry(lambda: _count_partitions(bus))
        watermarks_from = await retry(lambda: _find_watermarks_end(bus))
        stage_check.waits("joining the group")
        delivery_check.ok("nothing to deliver yet")
        async with bus.producer() as producer:
            dead_letters = DeadLetterQueue(
                consumer=settings.join.group,
                producer=producer,
                topic=bus.topics.dead_letters,
                partitions=dead_letter_partitions,
                state_topics=state_names(bus.topics),
            )
            namespace_dead_letters = NamespaceDeadLetters(
                consumer=settings.join.group,
                producer=producer,
                topic=bus.topics.dead_letters,
                partitions=dead_letter_partitions,
            )
            stage = JoinStage(
                dead_letters=dead_letters,
                namespace_dead_letters=namespace_dead_letters,
                is_placed=placement_rule(partitions=inputs),
                topics=bus.topics,
                watermarks_from=watermarks_from,
                pending_pod_timeout_seconds=settings.join.pending_pod_timeout_seconds,
            )
            follower = NamespaceFollower(
                stage=stage, dead_letters=namespace_dead_letters, history=bus, retry=following
            )
            # Read all namespaces before the group assigns partitions and ticks are described.
            await follower.read_up()
            followed = tasks.create_task(follower.follow())
            async with TransactionalWriters(
                bus=bus, group=settings.join.group, finish_seconds=_FINISH_SECONDS
            ) as writers:
                delivery = Delivery(
                    writers=writers,
                    dead_letters=dead_letters,
                    check=delivery_check,
                    fenced_seconds=settings.kafka.heartbeat_seconds,
                )
                worker = _make_worker(
                    bus=bus,
                    settings=settings,
                    readiness=readiness,
                    stage=stage,
                    dead_letters=dead_letters,
                    delivery=delivery,
                    retry=retry,
                )
                instance = settings.kafka.group_instance_id or None
                await worker.run(bus=bus, group_instance_id=instance)
        watch.cancel()
        followed.cancel()


def _in_group_of(topics: Topics, settings: JoinSettings) -> JoinSettings:
    """Return the settings with this installation's prefix in the name of the consumer group."""
    tuning = msgspec.structs.replace(settings.join, group=topics.group(settings.join.group))
    return msgspec.structs.replace(settings, join=tuning)


def _make_worker(
    *,
    bus: Bus,
    settings: JoinSettings,
    readiness: Readiness,
    stage: JoinStage,
    dead_letters: DeadLetterQueue,
    delivery: Delivery,
    retry: RetryingCaller[BusError],
) -> JoinWorker:
    publisher = name_publisher(settings.kafka.client_id)
    announcer = Announcer(topic=bus.topics.events.name, publisher=publisher)
    restorer = StateRestorer(
        stage=stage,
        delivery=delivery,
        retry=retry,
        tuning=settings.join,
        check=readiness.check("pods"),
        backoff=_new_backoff(),
        history=bus,
        announcer=announcer,
    )
    return JoinWorker(
        lag=Lag(clock=SystemClock()),
        stage=stage,
        dead_letters=dead_letters,
        delivery=delivery,
        restorer=restorer,
        retry=retry,
        tuning=settings.join,
        gaps=GapCheck(readiness.check("gaps", severity=CheckSeverity.WARNING)),
        announcer=announcer,
        topics=bus.topics,
    )


async def _find_watermarks_end(bus: Bus) -> Mapping[int, int]:
    """Return the end offset of each partition of the watermarks topic, by partition number.

    Watermarks after these offsets are newer than this worker's start. Offsets are compared, not
    times, because podwatch's clock and the worker's clock may differ.
    """
    async with bus.reader() as reader:
        spans = await reader.spans(bus.topics.watermarks.name)
    return {partition.partition: span.end for partition, span in spans.items()}


async def _count_partitions(bus: Bus) -> tuple[int, int]:
    """Return the number of input partitions and the number of dead-letter partitions.

    Raise `TopicsError` if a topic is missing, or if input and output topics have different numbers
    of partitions.
    """
    topics = bus.topics
    by_node = (
        *input_names(topics),
        *state_names(topics),
        topics.progress.name,
        topics.events.name,
        topics.attributed_incidents.name,
    )
    # A node's records must be in partitions of the same number, because one worker needs them all.
    counts = {name: await bus.partitions(name) for name in by_node}
    return agreed_partitions(counts), await bus.partitions(topics.dead_letters.name)

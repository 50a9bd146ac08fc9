"""`gpuledger topics`: makes topics, checks them, says up to when they are complete."""

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Final, Literal

import yaml
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from gpuledger.bus.administration import TopicLine, check_topics, create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.completeness import MAX_AHEAD_NS, Completeness, key_of
from gpuledger.errors import UndecodableError
from gpuledger.records import Watermark
from gpuledger.rights import ApiVersion, strimzi_manifests
from gpuledger.time_ranges import parse_moment, write_moment
from gpuledger.topics import Topics
from gpuledger_cli.kafka_options import NO_OPTIONS, Config, KafkaOptions

WIDTH_IN_FILES: Final = 160
_COLOURS: Final = {"ok": "green", "created": "green"}

app = App(
    name="topics",
    help="Make the topics on a Kafka broker, check those there, say up to when they are complete,"
    " or print them for Strimzi.",
)


Stage = Literal["join", "store", "rows", "podwatch"]
MAX_OFFSET: Final = 2**63 - 1
Partitions = Annotated[
    int | None,
    Parameter(
        help="Partitions of the topics placed by node; absent: as the ticks' topic has, else 12.",
        validator=Number(gte=1),
    ),
]
Replicas = Annotated[
    int | None,
    Parameter(
        help="Replicas of each new topic; as many as there are brokers, at most 3, where absent.",
        validator=Number(gte=1),
    ),
]


@app.command
def create(
    *,
    kafka: KafkaOptions = NO_OPTIONS,
    partitions: Partitions = None,
    replication_factor: Replicas = None,
) -> int:
    """Make the topics that are missing; refuse where one has another number of partitions."""
    settings = kafka.settings()
    lines = asyncio.run(
        create_topics(settings, partitions=partitions, replication_factor=replication_factor)
    )
    show(lines)
    return 0


@app.command
def check(
    *,
    kafka: KafkaOptions = NO_OPTIONS,
    partitions: Partitions = None,
) -> int:
    """Report for each topic whether it is as it must be; exit 1 where one is not."""
    settings = kafka.settings()
    lines = asyncio.run(check_topics(settings, partitions=partitions))
    show(lines)
    return 0 if all(line.status == "ok" for line in lines) else 1


@app.command
def complete(
    *,
    stage: Annotated[
        Stage,
        Parameter(
            help="Whose word it is: of join, store and rows that all events are there; of podwatch"
            " that all pods are whose watermarks it has published."
        ),
    ] = "store",
    cluster: Annotated[
        str | None,
        Parameter(help="Ask of this cluster alone; absent: of all that anything is known of."),
    ] = None,
    until: Annotated[
        str | None,
        Parameter(
            help="Ask whether all is there up to this time: 2026-11-21T14:00:00Z, or -1h.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Say up to when a stage is complete; exit 1 where that is unknown, or before --until."""
    settings = kafka.settings()
    now_ms = time.time_ns() // NS_PER_MS
    until_ms = None if until is None else parse_moment(until, option="--until", now_ms=now_ms)
    partitions, watermarks = asyncio.run(read_watermarks(KafkaBus(settings), stage))
    until_ns = None if until_ms is None else until_ms * NS_PER_MS
    if cluster is not None:
        watermarks = [watermark for watermark in watermarks if watermark.cluster == cluster]
    lines = completeness_lines(watermarks, partitions=partitions, until_ns=until_ns)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if lines[0].startswith("complete") else 1


async def read_watermarks(history: Bus, stage: Stage) -> tuple[int, list[Watermark]]:
    """Return how many partitions there are, and what holds of them by the stage's word."""
    topics = history.topics
    spoken_of = {"podwatch": topics.pods, "rows": topics.rows}.get(stage, topics.events)
    completeness = Completeness(stage=stage, topic=spoken_of.name)
    decoder = decoder_of(topics.watermarks.name, Watermark)
    async with history.reader() as reader:
        spans = await reader.spans(topics.watermarks.name)
        partitions = len(await reader.spans(spoken_of.name))
        for at, span in spans.items():
            async for records in reader.read(at, span):
                for record in records:
                    if record.value is None and record.unreadable is None:
                        completeness.take_back(record.key or b"", at.partition)
                        continue
                    with suppress(UndecodableError):
                        watermark = decoder.decode(record.value)
                        # Who may write elsewhere speaks for no partition but his own.
                        is_own = (record.key, at.partition) == (
                            key_of(watermark),
                            watermark.partition,
                        )
                        if is_own and watermark.complete_until_ns <= time.time_ns() + MAX_AHEAD_NS:
                            completeness.take(watermark)
                        # Whoever asks here has what the stage has written, all of it.
                        completeness.read_to(at.partition, MAX_OFFSET)
    # The topic itself, where it was given more partitions than those that watermarks speak of.
    return max(len(spans), partitions), [
        watermark for at in spans for watermark in completeness.of(at.partition)
    ]


# It reads and writes what the others here do not.
app.command(
    "gpuledger_cli.retiring:retire",
    name="retire",
    help="Take back what is said of a cluster or a node that is gone: its boards cost no more.",
)


def completeness_lines(
    watermarks: Sequence[Watermark], *, partitions: int, until_ns: int | None
) -> list[str]:
    """Return what is said of them for people; the first line begins with `complete`, or not."""
    unheard = sorted(set(range(partitions)) - {watermark.partition for watermark in watermarks})
    earliest_ns = min((watermark.complete_until_ns for watermark in watermarks), default=0)
    behind = [
        f"partition {watermark.partition}, cluster {watermark.cluster}:"
        f" complete until {write_moment(watermark.complete_until_ns // NS_PER_MS)}"
        for watermark in sorted(watermarks, key=lambda watermark: watermark.complete_until_ns)
        if until_ns is not None and watermark.complete_until_ns < until_ns
    ]
    lines = [f"partition {partition}: nothing is known" for partition in unheard] + behind
    shown = write_moment(earliest_ns // NS_PER_MS)
    if unheard:
        first = f"not complete: of {len(unheard)} of {partitions} partitions nothing is known"
    elif behind and until_ns is not None:
        first = f"not complete until {write_moment(until_ns // NS_PER_MS)}, but until {shown}"
    else:
        first = f"complete until {shown}"
    silent = [
        f"node {node.node}, cluster {watermark.cluster}: silent since"
        f" {write_moment(node.since_time_ns // NS_PER_MS)}, and not waited for"
        for watermark in watermarks
        for node in watermark.silent or ()
    ]
    return [first, *lines, *silent]


@app.command
def strimzi(
    *,
    cluster: Annotated[str, Parameter(help="Name of the Kafka object that they belong to.")],
    config: Config = None,
    partitions: Partitions = None,
    replication_factor: Annotated[
        int, Parameter(help="Replicas of each topic.", validator=Number(gte=1, lte=32_767))
    ] = 3,
    api_version: Annotated[
        ApiVersion, Parameter(help="Version of Strimzi's API; v1beta2 before Strimzi 0.49.")
    ] = "v1",
) -> int:
    """Print a KafkaTopic for each topic and a KafkaUser, with its rights, for each deployable."""
    settings = KafkaOptions(config=config).settings()
    objects = strimzi_manifests(
        Topics(settings.topic_prefix),
        cluster=cluster,
        partitions=partitions,
        replicas=replication_factor,
        api_version=api_version,
    )
    for manifest in objects:
        # One by one, as an anchor for what several share is nothing for people.
        yaml.safe_dump(manifest, sys.stdout, sort_keys=False, explicit_start=True)
    return 0


def show(lines: Iterable[TopicLine]) -> None:
    """Print one row a topic."""
    table = Table("topic", "status", "wanted", "found", box=None, pad_edge=False)
    for line in lines:
        colour = _COLOURS.get(line.status, "red")
        table.add_row(line.topic, f"[{colour}]{line.status}[/]", line.wanted, line.found)
    # A file has no width of its own, and Rich's default of 80 columns would cut the names.
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table)

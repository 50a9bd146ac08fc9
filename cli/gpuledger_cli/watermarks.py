"""`gpuledger watermarks`: shows the time through which the topics are complete."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.completeness import MAX_AHEAD_NS, Completeness, key_of
from gpuledger.errors import UndecodableError
from gpuledger.records import Watermark
from gpuledger.time_ranges import parse_moment, write_moment
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.option_help import epilogue, time_option

Component = Literal["join", "store", "rows", "podwatch"]
MAX_OFFSET: Final = 2**63 - 1
app = App(
    name="watermarks",
    help_format="plaintext",
    help_epilogue=epilogue(
        examples={
            "Through which time is the store complete?": "gpuledger watermarks",
            "In a script: is everything before 10:00 complete?": (
                "gpuledger watermarks --until 2026-11-22T10:00:00Z && \\\n"
                "    gpuledger bill --store gpuledger-store --from 2026-11-22T09:00:00Z \\\n"
                "        --to 2026-11-22T10:00:00Z"
            ),
            "How far has the join processed one cluster?": (
                "gpuledger watermarks --component join --cluster eu-west-1"
            ),
        },
        codes={0: "complete, through --until if given", 1: "not complete, or unknown"},
    ),
)


@app.default
def watermarks(
    *,
    component: Annotated[
        Component,
        Parameter(
            help="Component that publishes the watermarks: join, store and rows for events,"
            " podwatch for pods."
        ),
    ] = "store",
    cluster: Annotated[
        str | None, Parameter(help="Only this cluster; by default all clusters.")
    ] = None,
    until: Annotated[
        str | None, time_option("Check that everything before this time is complete")
    ] = None,
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Show the time through which a component has processed all topics and partitions."""
    settings = kafka.settings()
    now_ms = time.time_ns() // NS_PER_MS
    until_ms = None if until is None else parse_moment(until, option="--until", now_ms=now_ms)
    partitions, found = asyncio.run(read_watermarks(KafkaBus(settings), component))
    until_ns = None if until_ms is None else until_ms * NS_PER_MS
    if cluster is not None:
        found = [watermark for watermark in found if watermark.cluster == cluster]
    lines = completeness_lines(found, partitions=partitions, until_ns=until_ns)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0 if lines[0].startswith("complete") else 1


async def read_watermarks(history: Bus, component: Component) -> tuple[int, list[Watermark]]:
    """Return the number of partitions, and the watermarks of a component."""
    topics = history.topics
    reported = {"podwatch": topics.pods, "rows": topics.rows}.get(component, topics.events)
    completeness = Completeness(component=component, topic=reported.name)
    decoder = decoder_of(topics.watermarks.name, Watermark)
    async with history.reader() as reader:
        spans = await reader.spans(topics.watermarks.name)
        partitions = len(await reader.spans(reported.name))
        for at, span in spans.items():
            async for records in reader.read(at, span):
                for record in records:
                    if record.value is None and record.unreadable is None:
                        completeness.take_back(record.key or b"", at.partition)
                        continue
                    with suppress(UndecodableError):
                        watermark = decoder.decode(record.value)
                        # A watermark counts only in the partition that it is about.
                        is_own = (record.key, at.partition) == (
                            key_of(watermark),
                            watermark.partition,
                        )
                        if is_own and watermark.complete_until_ns <= time.time_ns() + MAX_AHEAD_NS:
                            completeness.take(watermark)
                        # The component's topic is not read here, so all its records count as read.
                        completeness.read_to(at.partition, MAX_OFFSET)
    # The topic may have more partitions than there are watermarks for.
    return max(len(spans), partitions), [
        watermark for at in spans for watermark in completeness.of(at.partition)
    ]


def completeness_lines(
    watermarks: Sequence[Watermark], *, partitions: int, until_ns: int | None
) -> list[str]:
    """Return the lines to print; the first begins with `complete` or `not complete`."""
    unheard = sorted(set(range(partitions)) - {watermark.partition for watermark in watermarks})
    earliest_ns = min((watermark.complete_until_ns for watermark in watermarks), default=0)
    behind = [
        f"partition {watermark.partition}, cluster {watermark.cluster}:"
        f" complete through {write_moment(watermark.complete_until_ns // NS_PER_MS)}"
        for watermark in sorted(watermarks, key=lambda watermark: watermark.complete_until_ns)
        if until_ns is not None and watermark.complete_until_ns < until_ns
    ]
    lines = [f"partition {partition}: no watermark" for partition in unheard] + behind
    shown = write_moment(earliest_ns // NS_PER_MS)
    if unheard:
        first = f"not complete: no watermark of {len(unheard)} of {partitions} partitions"
    elif behind and until_ns is not None:
        first = f"not complete through {write_moment(until_ns // NS_PER_MS)}, only through {shown}"
    else:
        first = f"complete through {shown}"
    unresponsive = [
        f"node {node.node}, cluster {watermark.cluster}: unresponsive since"
        f" {write_moment(node.since_time_ns // NS_PER_MS)}, not waited for"
        for watermark in watermarks
        for node in watermark.unresponsive or ()
    ]
    return [first, *lines, *unresponsive]

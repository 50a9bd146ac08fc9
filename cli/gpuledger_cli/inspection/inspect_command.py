"""`gpuledger inspect`: the allocations and the use of each GPU now, from the events on Kafka."""

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus, Span
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent
from gpuledger_cli.inspection.shares import (
    Node,
    as_objects,
    detail_lines,
    node_of,
    old_hints,
    summary_lines,
    unnamed_hints,
)
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.option_help import epilogue

LOOKBACK_SECONDS: Final = 30
NOTHING: Final = 1
app = App(
    name="inspect",
    usage="gpuledger inspect [OPTIONS] [NODE...]",
    help_format="plaintext",
    help_epilogue=epilogue(
        "Memory is in GiB; in JSON, it is in bytes. A pod's allocated memory is its share"
        " of the GPU times the GPU's memory. Used memory and busy time are measured.",
        examples={
            "The memory of all GPUs, by node": "gpuledger inspect",
            "The pods on one node": "gpuledger inspect -d gpu-node-7",
        },
        codes={0: "at least one node was found", NOTHING: "no node was found"},
    ),
)


@app.default
def inspect_gpus(
    *nodes: Annotated[
        str,
        Parameter(
            name="NODE",
            help="Only these nodes, as NODE or CLUSTER/NODE.",
            allow_leading_hyphen=False,
        ),
    ],
    details: Annotated[
        bool, Parameter(name=("--details", "-d"), negative=(), help="Show the pods of each node.")
    ] = False,
    cluster: Annotated[
        str | None, Parameter(help="Only this cluster; by default all clusters.")
    ] = None,
    format: Annotated[  # noqa: A002  # the option's name
        Literal["table", "json"], Parameter(help="A table, or one JSON object.")
    ] = "table",
    kafka: KafkaOptions = NO_OPTIONS,
) -> int:
    """Show the allocations and the current use of each node's GPUs."""
    since_ms = time.time_ns() // NS_PER_MS - LOOKBACK_SECONDS * 1000
    events = asyncio.run(read_newest(KafkaBus(kafka.settings()), since_ms=since_ms))
    found = [*map(node_of, events)]
    shown = [node for node in found if is_selected(node, nodes=nodes, cluster=cluster)]
    if format == "json":
        sys.stdout.write(f"{json.dumps({'nodes': as_objects(shown)})}\n")
    elif shown:
        for line in (detail_lines if details else summary_lines)(shown):
            sys.stdout.write(f"{line}\n")
    for line in (
        *unnamed_hints(shown),
        *old_hints(shown, now_ns=time.time_ns()),
        *explain_absent(found, nodes=nodes, cluster=cluster),
    ):
        sys.stderr.write(f"gpuledger: {line}\n")
    return 0 if shown else NOTHING


def explain_absent(
    found: Sequence[Node], *, nodes: Sequence[str], cluster: str | None
) -> Iterator[str]:
    """Yield the reason why the result lacks nodes; nothing if each name has a node."""
    recent = f"no event in the last {LOOKBACK_SECONDS} s"
    if not found:
        yield (
            f"{recent}; check the agents and the join with `gpuledger watermarks --component join`"
        )
        return
    names: Sequence[Sequence[str]] = [[name] for name in nodes] or [[]]
    for name in names:
        if not any(is_selected(node, nodes=name, cluster=cluster) for node in found):
            selected = [*name, *([f"cluster {cluster}"] if cluster else [])]
            yield f"{' in '.join(selected)}: {recent}; `gpuledger inspect` shows all nodes"


def is_selected(node: Node, *, nodes: Sequence[str], cluster: str | None) -> bool:
    """Return whether the options select a node, by its name or with its cluster."""
    return cluster in {None, node.cluster} and (
        not nodes or node.node in nodes or node_key(node) in nodes
    )


async def read_newest(bus: Bus, *, since_ms: int) -> Sequence[GpuEvent]:
    """Return the newest event of each node that was published since a time, by node."""
    topic = bus.topics.events.name
    decoder = decoder_of(topic, GpuEvent)
    newest: dict[str, GpuEvent] = {}
    async with bus.reader() as reader:
        spans = await reader.spans(topic)
        first = await reader.offsets_at(spans, since_ms)
        for at, span in spans.items():
            start = max(span.first, first[at])
            if start >= span.end:
                continue
            async with aclosing(reader.read(at, Span(start, span.end))) as chunks:
                async for records in chunks:
                    for record in records:
                        with suppress(UndecodableError):
                            event = decoder.decode(record.value)
                            former = newest.get(node_key(event))
                            if former is None or former.time_ns <= event.time_ns:
                                newest[node_key(event)] = event
    return [newest[key] for key in sorted(newest)]

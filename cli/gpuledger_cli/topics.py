"""`gpuledger topics`: creates topics, checks them, prints them and their ACLs for other tools."""

import asyncio
import sys
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import yaml
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from gpuledger.bus.administration import (
    TopicLine,
    check_topics,
    create_topics,
    partitions_remedy,
)
from gpuledger.errors import UserError
from gpuledger.rights import ApiVersion, acl_commands, strimzi_manifests
from gpuledger.topics import Topics
from gpuledger_cli.kafka_options import NO_OPTIONS, KafkaOptions
from gpuledger_cli.option_help import epilogue

WIDTH_IN_FILES: Final = 160
_COLOURS: Final = {"ok": "green", "created": "green"}

app = App(name="topics", help_format="plaintext")
ExportFormat = Literal["strimzi", "acls"]
Partitions = Annotated[
    int | None,
    Parameter(
        help="Partitions of topics keyed by node; by default as many as existing topics have, or"
        " 12.",
        validator=Number(gte=1),
    ),
]
Replicas = Annotated[
    int | None,
    Parameter(
        help="Replicas of each new topic; by default as many as there are brokers, at most 3.",
        validator=Number(gte=1),
    ),
]


@app.command(
    help_epilogue=epilogue(
        examples={
            "Create missing topics": "gpuledger topics create",
            "For many nodes": (
                "gpuledger topics create --bootstrap-servers kafka:9092 --partitions 24"
            ),
        },
        codes={2: "a topic has another number of partitions, or Kafka is unavailable"},
    )
)
def create(
    *,
    kafka: KafkaOptions = NO_OPTIONS,
    partitions: Partitions = None,
    replication_factor: Replicas = None,
) -> int:
    """Create the topics that are missing; existing topics stay as they are."""
    settings = kafka.settings()
    lines = asyncio.run(
        create_topics(settings, partitions=partitions, replication_factor=replication_factor)
    )
    show(lines)
    return 0


@app.command(
    help_epilogue=epilogue(
        examples={
            "Check all topics": "gpuledger topics check",
            "With the credentials of a component": "gpuledger topics check --config join.yaml",
        },
        codes={0: "all topics are as required", 1: "at least one topic differs or is missing"},
    )
)
def check(
    *,
    kafka: KafkaOptions = NO_OPTIONS,
    partitions: Partitions = None,
) -> int:
    """Check that each topic exists and is configured as required."""
    settings = kafka.settings()
    lines = asyncio.run(check_topics(settings, partitions=partitions))
    show(lines)
    if any(line.status == "partitions differ" for line in lines):
        sys.stdout.write(f"\n{partitions_remedy(is_given=partitions is not None)}.\n")
    return 0 if all(line.status == "ok" for line in lines) else 1


@app.command(
    help_epilogue=epilogue(
        "Both formats have the ACLs of every component and command, and the topic prefix of"
        " kafka.topic_prefix. Delete the users that you do not need.",
        examples={
            "Print the ACLs as commands for Kafka's own tool": (
                "gpuledger topics export --format acls"
            ),
            "Topics and users for Strimzi": (
                "gpuledger topics export --format strimzi --cluster main | kubectl apply -f -"
            ),
        },
    )
)
def export(
    *,
    format: Annotated[  # noqa: A002  # the option's name
        ExportFormat,
        Parameter(
            help="strimzi: a KafkaTopic for each topic and a KafkaUser with its ACLs for each"
            " component. acls: a kafka-acls.sh command for each ACL."
        ),
    ],
    cluster: Annotated[
        str | None, Parameter(help="Name of the Kafka object, for --format strimzi.")
    ] = None,
    kafka: KafkaOptions = NO_OPTIONS,
    partitions: Partitions = None,
    replication_factor: Annotated[
        int, Parameter(help="Replicas of each topic.", validator=Number(gte=1, lte=32_767))
    ] = 3,
    api_version: Annotated[
        ApiVersion, Parameter(help="Version of Strimzi's API; v1beta2 before Strimzi 0.49.")
    ] = "v1",
) -> int:
    """Print the ACLs (--format acls), or topics and ACLs for Strimzi (--format strimzi)."""
    settings = kafka.settings()
    topics = Topics(settings.topic_prefix)
    if format == "acls":
        for line in acl_commands(topics, bootstrap_servers=settings.bootstrap_servers):
            sys.stdout.write(f"{line}\n")
        return 0
    if cluster is None:
        raise UserError("--cluster: missing; give the name of the Kafka object of Strimzi")
    objects = strimzi_manifests(
        topics,
        cluster=cluster,
        partitions=partitions,
        replicas=replication_factor,
        api_version=api_version,
    )
    for manifest in objects:
        # One by one, because YAML would write shared parts as anchors.
        yaml.safe_dump(manifest, sys.stdout, sort_keys=False, explicit_start=True)
    return 0


def show(lines: Iterable[TopicLine]) -> None:
    """Print a row for each topic; the columns for differences appear only if there are any."""
    rows = list(lines)
    differences = ("wanted", "found") if any(line.wanted or line.found for line in rows) else ()
    table = Table("topic", "status", *differences, box=None, pad_edge=False)
    for line in rows:
        colour = _COLOURS.get(line.status, "red")
        cells = (line.topic, f"[{colour}]{line.status}[/]", line.wanted, line.found)
        table.add_row(*cells[: len(table.columns)])
    # Files have no width, and Rich's default of 80 columns would cut the names.
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table)

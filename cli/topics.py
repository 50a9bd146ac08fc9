"""`gpuledger topics`: makes topics, says what is wrong with them, prints them for Strimzi."""

import asyncio
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from gpuledger.bus.administration import TopicLine, check_topics, create_topics
from gpuledger.rights import ApiVersion, strimzi_manifests
from gpuledger.settings import KafkaSettings, Option, load_settings
from gpuledger.topics import Topics

WIDTH_IN_FILES: Final = 160
_COLOURS: Final = {"ok": "green", "created": "green"}

app = App(
    name="topics",
    help="Make the topics on a Kafka broker, check those there, or print them for Strimzi.",
)


class TopicsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is read from the settings file and the environment."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-topics")
    """How to reach the brokers."""


BootstrapServers = Annotated[
    str | None, Parameter(help="Brokers to ask first, host:port, separated by commas.")
]
Config = Annotated[Path | None, Parameter(help="Settings file (YAML); its kafka section is read.")]
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
    bootstrap_servers: BootstrapServers = None,
    config: Config = None,
    partitions: Partitions = None,
    replication_factor: Replicas = None,
) -> int:
    """Make the topics that are missing; refuse where one has another number of partitions."""
    settings = kafka_settings(bootstrap_servers=bootstrap_servers, config=config)
    lines = asyncio.run(
        create_topics(settings, partitions=partitions, replication_factor=replication_factor)
    )
    show(lines)
    return 0


@app.command
def check(
    *,
    bootstrap_servers: BootstrapServers = None,
    config: Config = None,
    partitions: Partitions = None,
) -> int:
    """Report for each topic whether it is as it must be; exit 1 where one is not."""
    settings = kafka_settings(bootstrap_servers=bootstrap_servers, config=config)
    lines = asyncio.run(check_topics(settings, partitions=partitions))
    show(lines)
    return 0 if all(line.status == "ok" for line in lines) else 1


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
    settings = kafka_settings(bootstrap_servers=None, config=config)
    objects = strimzi_manifests(
        Topics(settings.topic_prefix),
        cluster=cluster,
        partitions=partitions,
        replicas=replication_factor,
        api_version=api_version,
    )
    for each in objects:
        # One by one, as an anchor for what several share is nothing for people.
        yaml.safe_dump(each, sys.stdout, sort_keys=False, explicit_start=True)
    return 0


def kafka_settings(*, bootstrap_servers: str | None, config: Path | None) -> KafkaSettings:
    """Read the settings as a deployable does; raises `SettingsError`."""
    argv = [f"--config={config}"] if config else []
    argv += [f"--bootstrap-servers={bootstrap_servers}"] if bootstrap_servers else []
    option = Option(
        name="--bootstrap-servers", setting="kafka.bootstrap_servers", help="Brokers to ask first."
    )
    loaded = load_settings(
        TopicsSettings, prog="gpuledger topics", description="", options=[option], argv=argv
    )
    return loaded.kafka


def show(lines: Iterable[TopicLine]) -> None:
    """Print one row a topic."""
    table = Table("topic", "status", "wanted", "found", box=None, pad_edge=False)
    for line in lines:
        colour = _COLOURS.get(line.status, "red")
        table.add_row(line.topic, f"[{colour}]{line.status}[/]", line.wanted, line.found)
    # A file has no width of its own, and Rich's default of 80 columns would cut the names.
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table)

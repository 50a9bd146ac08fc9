"""How a command is told the brokers, and what it reads of a deployable's settings file."""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from gpuledger.settings import KafkaSettings, Option, load_settings


class TopicsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is read from the settings file and the environment."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-topics")
    """How to reach the brokers."""


BootstrapServers = Annotated[
    str | None, Parameter(help="Brokers to ask first, host:port, separated by commas.")
]
Config = Annotated[
    Path | None,
    Parameter(
        help="Settings file (YAML) of any deployable; its kafka section is read, which"
        " `gpuledger-join --help` lists."
    ),
]


def kafka_settings(*, bootstrap_servers: str | None, config: Path | None) -> KafkaSettings:
    """Read the settings as a deployable does; raises `SettingsError`."""
    argv = [f"--config={config}"] if config else []
    argv += [f"--bootstrap-servers={bootstrap_servers}"] if bootstrap_servers else []
    option = Option(
        name="--bootstrap-servers", setting="kafka.bootstrap_servers", help="Brokers to ask first."
    )
    loaded = load_settings(
        TopicsSettings,
        prog="gpuledger topics",
        description="",
        options=[option],
        argv=argv,
        ignores_other_sections=True,
    )
    return loaded.kafka

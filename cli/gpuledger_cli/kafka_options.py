"""The options by which a command finds Kafka, and what it reads of a settings file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from gpuledger.settings import KafkaSettings, Option, load_settings


class TopicsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is read from the settings file and the environment."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-topics")
    """How to reach the brokers."""


Config = Annotated[
    Path | None,
    Parameter(
        help="Settings file (YAML) of any deployable; its kafka section is read, which"
        " `gpuledger config explain join kafka` lists."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KafkaOptions:
    """The options of every command that asks Kafka."""

    bootstrap_servers: Annotated[
        str | None, Parameter(help="Brokers to ask first, host:port, separated by commas.")
    ] = None
    config: Config = None

    def settings(self) -> KafkaSettings:
        """Read the settings as a deployable does; raises `SettingsError`."""
        argv = [f"--config={self.config}"] if self.config else []
        if self.bootstrap_servers:
            argv.append(f"--bootstrap-servers={self.bootstrap_servers}")
        option = Option(
            name="--bootstrap-servers",
            setting="kafka.bootstrap_servers",
            help="Brokers to ask first.",
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


NO_OPTIONS: Final = KafkaOptions()
"""The default of commands: what the environment says."""

"""The options of commands that connect to Kafka, and the settings that they read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from gpuledger.settings import KafkaSettings, Option, load_settings
from gpuledger.settings.sources import variable_of

_KAFKA: Final = "kafka"
_SERVERS: Final = (_KAFKA, "bootstrap_servers")


class TopicsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings read from the file and the environment."""

    kafka: KafkaSettings = KafkaSettings(client_id="gpuledger-topics")
    """Connection to the brokers."""


Config = Annotated[
    Path | None,
    Parameter(
        help="Settings file (YAML) of a component; only its section kafka is read. `gpuledger"
        " config explain join kafka` lists these settings and their variables, such as"
        f" {variable_of((_KAFKA, 'security_protocol'))}."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KafkaOptions:
    """The options of every command that connects to Kafka."""

    # cyclopts does not read the variable. It is read with the other settings, whose errors name the
    # variable instead of the option.
    bootstrap_servers: Annotated[
        str | None,
        Parameter(
            help="Kafka brokers to connect to first, host:port, separated by commas."
            f" [env var: {variable_of(_SERVERS)}]",
            show_default=lambda _: TopicsSettings().kafka.bootstrap_servers,
        ),
    ] = None
    config: Config = None

    def settings(self) -> KafkaSettings:
        """Read the settings as components do; raises `SettingsError`."""
        argv = [f"--config={self.config}"] if self.config else []
        if self.bootstrap_servers is not None:
            argv.append(f"--bootstrap-servers={self.bootstrap_servers}")
        option = Option(name="--bootstrap-servers", setting=".".join(_SERVERS), help="Brokers.")
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
"""The default value for commands: all settings are read from the environment."""

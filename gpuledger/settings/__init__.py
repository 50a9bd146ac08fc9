"""Settings: typed and strict; from defaults, a YAML file, the environment and the command line."""

from gpuledger.settings.command_line import Option, load_settings
from gpuledger.settings.groups import HttpSettings, KafkaSettings, LogSettings
from gpuledger.settings.secret import Secret

__all__ = ["HttpSettings", "KafkaSettings", "LogSettings", "Option", "Secret", "load_settings"]

"""The components for reference pages: their settings, options and examples, as in `--help`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final

import gpuledger_agent.command
import gpuledger_cli.standalone.standalone_command
import gpuledger_enricher.join.join_command
import gpuledger_enricher.podwatch.pod_watch
import gpuledger_reports.command
import gpuledger_sinks.command
from gpuledger.settings import Option
from gpuledger.settings.command_line import shown_settings
from gpuledger.settings.explain_command import SETTINGS_CLASSES
from gpuledger.settings.sources import Setting, settings_of


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component, as its module `command` describes it to `--help`."""

    name: str
    module: ModuleType
    options: Sequence[Option] = ()
    introduction: str = ""
    """About its settings, if most of them are those of other components."""

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All its settings, in order."""
        module, name = SETTINGS_CLASSES[self.name]
        return settings_of(getattr(import_module(module), name))

    @property
    def common(self) -> frozenset[str]:
        """Names of the settings that `--help` shows, for whichever choice on the command line."""
        sections = [
            each for option in self.options if option.chooses_section for each in option.choices
        ]
        return frozenset(
            setting.name
            for given in ([], *([section] for section in sections))
            for setting in shown_settings(
                self.settings, options=self.options, common=self.module.COMMON, given=given
            )
        )


COMPONENTS: Final = (
    Component(
        name="agent",
        module=gpuledger_agent.command,
        options=gpuledger_agent.command.OPTIONS,
    ),
    Component(name="podwatch", module=gpuledger_enricher.podwatch.pod_watch),
    Component(name="join", module=gpuledger_enricher.join.join_command),
    Component(
        name="sink",
        module=gpuledger_sinks.command,
        options=gpuledger_sinks.command.OPTIONS,
    ),
    Component(name="reports", module=gpuledger_reports.command),
    Component(
        name="standalone",
        module=gpuledger_cli.standalone.standalone_command,
        options=gpuledger_cli.standalone.standalone_command.OPTIONS,
        introduction="`gpuledger standalone` has the shared settings, the agent's settings,"
        " podwatch's settings `kubernetes`, and the sinks' settings `remote_write`, `alerts` and"
        " `store`. The settings `kafka`, `no_kafka` and `spool` have no effect. This table lists"
        " its other settings, and settings with another default.",
    ),
)

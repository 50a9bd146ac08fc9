"""The settings of `gpuledger standalone`. `gpuledger.settings` loads them."""

from typing import Literal

import msgspec
from typing_extensions import override

from gpuledger_agent.settings import AgentSettings
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings, StoreSettings

SinkName = Literal["store", "remote_write", "alerts"]


class StandaloneSettings(AgentSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of `gpuledger standalone`: the agent's, and those of the other components.

    `kafka`, `no_kafka` and `spool` have no effect, because nothing leaves the process.
    """

    sinks: list[SinkName] = msgspec.field(default_factory=lambda: ["store"])
    """Sinks to run: `store`, `remote_write` and `alerts`."""
    maintain: bool = True
    """Whether to maintain the store every ten minutes. Disable it to run `gpuledger store maintain`
    with other options, such as a longer retention."""
    store: StoreSettings = StoreSettings()
    """Settings of the store sink."""
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    """Settings of the remote-write sink."""
    alerts: AlertsSettings = AlertsSettings()
    """Settings of the alerts sink."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    """Connection to the API server, for the names of pods; used if one is configured."""

    @override
    def __post_init__(self) -> None:
        """Raise `ValueError` for an invalid cluster or source, or a sink that would not run."""
        super().__post_init__()
        if not self.sinks:
            raise ValueError("sinks: empty list; give at least `store`")
        if len(self.sinks) > len(set(self.sinks)):
            raise ValueError("sinks: a sink is listed twice; list each once")
        for name in ("remote_write", "alerts"):
            if getattr(self, name) != type(getattr(self, name))() and name not in self.sinks:
                raise ValueError(f"sinks: missing {name}, which has settings; add it")

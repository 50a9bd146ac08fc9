"""The settings of the alerts sink."""

from typing import Annotated

import msgspec

from gpuledger.settings.address import require_http_url
from sinks.login import LoginSettings, refuse_half_a_login

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class BusyWithoutPodSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a GPU that works for no pod is an alert."""

    threshold_ratio: Ratio = 0.05
    """The share of the time, booked on the host or on nobody, from which on it counts."""
    for_seconds: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How long it must last, by the events' own time, before the alert fires."""


class AlertsSettings(LoginSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where alerts go, by what login to each of them, and when they fire."""

    urls: list[str] = msgspec.field(default_factory=lambda: ["http://localhost:9093"])
    """Every Alertmanager of the cluster, each by itself: not a load balancer before them."""
    timeout_seconds: Seconds = 10.0
    """How long one request may take."""
    resend_seconds: Seconds = 60.0
    """How often a firing alert is sent again; it ends by itself four times that after the last."""
    incident_hold_seconds: Seconds = 300.0
    """How long the alert of an incident stands from when the first Alertmanager takes it."""
    incident_age_seconds: Seconds = 3600.0
    """Incidents older than this, as after a long outage, are counted and not sent."""
    stale_after_seconds: Seconds = 600.0
    """An alert of a GPU of which nothing has come for so long is no longer sent; it ends by itself
    four times `resend_seconds` after it was sent last."""
    busy_without_pod: BusyWithoutPodSettings = BusyWithoutPodSettings()
    """The rule `GpuBusyWithoutPod`."""
    max_poll_records: Count = 500
    """The most records that one poll brings."""

    def __post_init__(self) -> None:
        """Refuse what cannot be reached; raises ValueError naming the field."""
        if not self.urls:
            raise ValueError("urls: name at least one Alertmanager")
        for url in self.urls:
            try:
                require_http_url(url)
            except ValueError as error:
                raise ValueError(f"urls: {error}") from error
        refuse_half_a_login(self, urls=self.urls)

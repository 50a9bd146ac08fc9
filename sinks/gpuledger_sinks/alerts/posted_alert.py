"""What every alert has beside its own labels and words when it is posted. Pure.

External labels, the address of what to do (`runbook_url`) and of where it comes from
(`generatorURL`) follow from the settings and the alert's own labels alone, so that they change no
alert's identity while it stands.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now
from gpuledger_sinks.settings import ALERT_ADDRESS_FIELDS, AlertsSettings


class AlertPosting:
    """Writes alerts as Alertmanager takes them."""

    def __init__(self, settings: AlertsSettings, *, resend_ns: int) -> None:
        """Take the settings, and how often a firing alert is posted again."""
        self._external_labels = settings.external_labels
        self._runbook_url, self._generator_url = settings.runbook_url, settings.generator_url
        self._resend_ns = resend_ns

    def as_json(self, alert: ActiveAlert, *, now: Now) -> dict[str, Any]:
        """Return an alert as `/api/v2/alerts` takes it."""
        written = alert.as_json(now=now, resend_ns=self._resend_ns)
        own = dict(alert.labels)
        written["labels"] = {**self._external_labels, **own}
        if self._runbook_url:
            written["annotations"]["runbook_url"] = _fill(self._runbook_url, own)
        if self._generator_url:
            written["generatorURL"] = _fill(self._generator_url, own)
        return written


def _fill(template: str, labels: Mapping[str, str]) -> str:
    """Return an address with an alert's labels in it; empty where it has no such label."""
    return template.format(
        **{name: quote(labels.get(name, ""), safe="") for name in ALERT_ADDRESS_FIELDS}
    )

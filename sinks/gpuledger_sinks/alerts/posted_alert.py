"""Adds external labels and addresses to alerts when they are posted. Pure.

External labels, `runbook_url` and `generatorURL` depend only on the settings and the alert's own
labels, so that they never change the identity of an active alert.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gpuledger_sinks.alerts.active_alerts import ActiveAlert, Now
from gpuledger_sinks.settings import ALERT_ADDRESS_FIELDS, AlertsSettings


class AlertPosting:
    """Encodes alerts for Alertmanager."""

    def __init__(self, settings: AlertsSettings, *, resend_ns: int) -> None:
        """Use the settings; a firing alert is posted every `resend_ns` nanoseconds."""
        self._external_labels = settings.external_labels
        self._runbook_url, self._generator_url = settings.runbook_url, settings.generator_url
        self._resend_ns = resend_ns

    def as_json(self, alert: ActiveAlert, *, now: Now) -> dict[str, Any]:
        """Return an alert in the format of `/api/v2/alerts`."""
        written = alert.as_json(now=now, resend_ns=self._resend_ns)
        own = dict(alert.labels)
        written["labels"] = {**self._external_labels, **own}
        if self._runbook_url:
            written["annotations"]["runbook_url"] = _fill(self._runbook_url, own)
        if self._generator_url:
            written["generatorURL"] = _fill(self._generator_url, own)
        return written


def _fill(template: str, labels: Mapping[str, str]) -> str:
    """Return a URL from a template with an alert's labels filled in; missing labels are empty."""
    return template.format(
        **{name: quote(labels.get(name, ""), safe="") for name in ALERT_ADDRESS_FIELDS}
    )

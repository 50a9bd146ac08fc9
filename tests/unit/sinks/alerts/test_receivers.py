"""Requests to Alertmanagers that fail by a defect of our own."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from gpuledger.runtime import Check
from gpuledger.runtime.http.client import open_http
from gpuledger_sinks.alerts.active_alerts import ActiveAlerts, Now
from gpuledger_sinks.alerts.posted_alert import AlertPosting
from gpuledger_sinks.alerts.receivers import AlertmanagerClient, CheckedClient, Receivers
from gpuledger_sinks.settings import AlertsSettings
from tests.hanging import HANG_SECONDS
from tests.unit.sinks.builders import SECOND_NS, START_NS, ManualClock


class BrokenClient(AlertmanagerClient):
    """A client with a defect."""

    @override
    async def post(self, alerts: Sequence[dict[str, Any]]) -> None:
        raise ZeroDivisionError


async def test_a_defect_in_sending_is_raised_and_not_retried() -> None:
    alerts, now = ActiveAlerts(), Now(time_ns=START_NS, monotonic_ns=START_NS)
    alerts.hold({"alertname": "A"}, {}, at_ns=START_NS, hold_ns=SECOND_NS, now=now)
    async with open_http(headers={}, timeout_seconds=10.0) as http, asyncio.timeout(HANG_SECONDS):
        client = BrokenClient(http=http, url="http://alertmanager")
        receivers = Receivers(
            [CheckedClient(client=client, check=Check())],
            active=lambda: [alerts],
            check=Check(),
            clock=ManualClock(),
            posting=AlertPosting(AlertsSettings(), resend_ns=60 * SECOND_NS),
            resend_ns=60 * SECOND_NS,
        )
        receivers.begin()
        await receivers.change()
        with pytest.raises(ZeroDivisionError):
            receivers.begin()

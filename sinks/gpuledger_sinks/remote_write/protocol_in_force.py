"""Selects the version of remote-write for the receiver.

`auto` starts with 2.0. A receiver that supports 2.0 reports how many samples it has written. Any
other receiver answers 415, or reads a 2.0 request as an empty 1.0 request and reports nothing. The
sink then uses 1.0 until it is restarted, or until a 1.0 request is answered with 415: the earlier
answer then came from something other than the receiver. Other response headers are not used,
because the protocol forbids deriving a version from them.
"""

import re
from collections.abc import Mapping
from typing import Final

import structlog

from gpuledger.runtime import Check
from gpuledger_sinks.metrics import show_protocol
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.wire import Version
from gpuledger_sinks.settings import RemoteWriteProtocol

_SAMPLES_WRITTEN: Final = "X-Prometheus-Remote-Write-Samples-Written"
_WRITTEN: Final = (
    _SAMPLES_WRITTEN,
    "X-Prometheus-Remote-Write-Histograms-Written",
    "X-Prometheus-Remote-Write-Exemplars-Written",
)
_COUNT: Final = re.compile(r"[0-9]{1,19}")
_log = structlog.get_logger(__name__)


def samples_written(headers: Mapping[str, str]) -> int | None:
    """Return how many samples the receiver reports as written; `None` without a report.

    If it reports only histograms or exemplars, it has written no samples.
    """
    counts = {name: headers.get(name, "") for name in _WRITTEN}
    reported = {name: int(count) for name, count in counts.items() if _COUNT.fullmatch(count)}
    return reported.get(_SAMPLES_WRITTEN, 0) if reported else None


class ProtocolInForce:
    """Tracks the version in use, and shows it in a check, a metric and the log."""

    def __init__(self, setting: RemoteWriteProtocol, *, check: Check) -> None:
        self._check = check
        self.version = Version.V1 if setting == "1.0" else Version.V2
        self.may_fall_back = setting == "auto"
        """Whether 1.0 may be used if the receiver does not support 2.0."""
        self.is_confirmed = False
        """Whether the receiver has shown that it supports 2.0."""
        # The receiver may have answered with an error such as 401, which its own check shows.
        begun = "first choice; no response so far shows the receiver's version"
        why = begun if self.may_fall_back else "as configured"
        self._show(why)

    def confirm(self) -> None:
        """Record that the receiver supports 2.0, because it reported the samples written."""
        if self.version is Version.V2 and not self.is_confirmed:
            self.is_confirmed = True
            self._show("the receiver reports written samples", is_news=True)

    def fall_back(self, why: str) -> None:
        """Use 1.0 from now on; `why` is shown by the check and the log."""
        if self.version is Version.V2:
            self.version, self.is_confirmed = Version.V1, False
            self._show(why, is_news=True)

    def return_to_v2(self, why: str) -> None:
        """Use 2.0 again, if 1.0 was only a fallback and the receiver does not support it either."""
        if self.may_fall_back and self.version is Version.V1:
            self.version = Version.V2
            self._show(why, is_news=True)

    def _show(self, why: str, *, is_news: bool = False) -> None:
        self._check.ok(f"remote-write {self.version}: {why}")
        show_protocol(REMOTE_WRITE.name, self.version, versions=Version)
        if is_news:
            _log.info("protocol_selected", protocol=self.version.value, detail=why)

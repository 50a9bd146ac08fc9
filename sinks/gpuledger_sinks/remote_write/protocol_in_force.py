"""Which version of remote-write is spoken with the receiver, and how that is found out.

`auto` begins with 2.0. A receiver that speaks it says how many samples it has written; one that
does not answers 415, or reads a request of 2.0 as an empty one of 1.0 and says nothing of what it
has written. From then on 1.0 is spoken, until the sink is started anew or that is answered 415: it
was something else that answered before. What else its headers say
is no sign: the protocol forbids to conclude a version from them.
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
    """Return how many samples a receiver says to have written; `None` where it says nothing.

    One that says so of histograms or exemplars alone has written no sample.
    """
    counts = {name: headers.get(name, "") for name in _WRITTEN}
    reported = {name: int(count) for name, count in counts.items() if _COUNT.fullmatch(count)}
    return reported.get(_SAMPLES_WRITTEN, 0) if reported else None


class ProtocolInForce:
    """The version in force, shown by a check, a metric and the log."""

    def __init__(self, setting: RemoteWriteProtocol, *, check: Check) -> None:
        self._check = check
        self.version = Version.V1 if setting == "1.0" else Version.V2
        self.may_fall_back = setting == "auto"
        """Whether 1.0 may be spoken where the receiver does not speak 2.0."""
        self.is_confirmed = False
        """Whether the receiver has shown that it speaks 2.0."""
        # It may have answered, as with 401 or 400, and is then shown by the receiver's own check.
        begun = "begun with; the receiver has not answered with anything that tells its version"
        why = begun if self.may_fall_back else "as set"
        self._show(why)

    def confirm(self) -> None:
        """Record that the receiver says what it has written of a request of 2.0."""
        if self.version is Version.V2 and not self.is_confirmed:
            self.is_confirmed = True
            self._show("the receiver says what it has written", is_news=True)

    def fall_back(self, why: str) -> None:
        """Speak 1.0 from now on."""
        if self.version is Version.V2:
            self.version, self.is_confirmed = Version.V1, False
            self._show(why, is_news=True)

    def return_to_v2(self, why: str) -> None:
        """Speak 2.0 again, where 1.0 was fallen back to and turns out not to be spoken."""
        if self.may_fall_back and self.version is Version.V1:
            self.version = Version.V2
            self._show(why, is_news=True)

    def _show(self, why: str, *, is_news: bool = False) -> None:
        self._check.ok(f"remote-write {self.version}: {why}")
        show_protocol(REMOTE_WRITE.name, self.version, versions=Version)
        if is_news:
            _log.info("protocol_selected", protocol=self.version.value, detail=why)

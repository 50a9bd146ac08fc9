"""Sends rejected ticks to a remote-write receiver again.

Each tick is sent separately as a past tick, which begins and ends no series. It therefore does not
affect the running sink's samples, and a rejection concerns only this tick. The dead letter of a
rejected interval is the interval's last tick. The interval's gauges are sent again with the time of
this tick. Counters are not sent, because later samples already include the use.
"""

from gpuledger.clock import Clock
from gpuledger.keys import node_key
from gpuledger.ledger.series import EventSeries
from gpuledger.records import GpuEvent
from gpuledger_sinks.errors import RejectedError
from gpuledger_sinks.protocol import Refusal, RejectedEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples
from gpuledger_sinks.remote_write.request_writer import FailingError, Writer
from gpuledger_sinks.remote_write.write_client import is_out_of_order
from gpuledger_sinks.remote_write.write_requests import AgeLimits
from gpuledger_sinks.settings import RemoteWriteSettings


class RemoteWriteRedelivery:
    """Sends one tick per request, and keeps no state."""

    def __init__(self, *, writer: Writer, settings: RemoteWriteSettings, clock: Clock) -> None:
        self._writer, self._settings, self._clock = writer, settings, clock
        self._limits = AgeLimits.of(settings)
        self._values = EventSeries(settings.sent_labels)

    async def send(self, rejected: RejectedEvent) -> Refusal | None:
        """Send a tick; return why it is rejected, or `None` if the receiver has accepted it.

        A tick that is older or further ahead than the settings allow is not sent.
        """
        if (refusal := self._refusal_of(rejected.event)) is not None:
            return refusal
        # A new object without earlier series, so that missing values end no series.
        series = ActiveSeries(external_labels=self._settings.external_labels)
        try:
            encoded = series.encode(self._samples_of(rejected))
        except ValueError as error:
            return Refusal("invalid", str(error))
        try:
            written = await self._writer.write(encoded, ticks=1)
        except FailingError as error:
            return Refusal("failing", str(error))
        except RejectedError as error:
            reason = "out_of_order" if is_out_of_order(str(error)) else "rejected"
            return Refusal(reason, str(error))
        if written < encoded.samples:
            detail = f"the receiver reports {written} of {encoded.samples} samples as written"
            return Refusal("partial", detail)
        return None

    def _refusal_of(self, event: GpuEvent) -> Refusal | None:
        ahead_ns, limits = event.time_ns - self._clock.time_ns(), self._limits
        if ahead_ns > limits.max_ahead_ns:
            return Refusal("future", "more than remote_write.max_future_seconds ahead")
        if limits.max_age_ns is not None and -ahead_ns > limits.max_age_ns:
            return Refusal("too_old", "older than remote_write.max_age_seconds")
        return None

    def _samples_of(self, rejected: RejectedEvent) -> IntervalSamples:
        """Return the samples of a tick; raise ValueError if the tick refers to missing entries."""
        event = rejected.event
        return IntervalSamples(
            node=node_key(event),
            time_ns=event.time_ns,
            values=self._values.values_of(event, None),
            record=rejected.record,
            is_past=True,
        )

"""Send refused ticks to a remote-write receiver once more.

Each travels alone, as one that others have followed: it begins and ends no series, so that what the
running sink sends meanwhile is not touched, and a refusal is of that tick and no other. What was
refused of an interval is the letter of its last tick: of that its gauges are sent, at their time.
The counters have gone on in what was sent since, and lack nothing.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from typing_extensions import override

from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.errors import RejectedError
from gpuledger_sinks.redelivery import Redelivery, Refusals, RefusedEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries, EncodedTick
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples, TickValues
from gpuledger_sinks.remote_write.tenants import Tenants
from gpuledger_sinks.remote_write.write_client import (
    RemoteWriteClient,
    is_behind_newer,
    open_client,
)
from gpuledger_sinks.remote_write.write_requests import AgeLimits
from gpuledger_sinks.settings import RemoteWriteSettings


@asynccontextmanager
async def open_redelivery(
    *,
    bus: Bus,  # noqa: ARG001  # as OpenRedelivery has it
    settings: RemoteWriteSettings,
    readiness: Readiness,
    clock: Clock,
) -> AsyncIterator["RemoteWriteRedelivery"]:
    """Open the redelivery to the receiver of these settings."""
    async with open_client(settings, readiness=readiness) as client:
        yield RemoteWriteRedelivery(client=client, settings=settings, clock=clock)


class RemoteWriteRedelivery(Redelivery):
    """Sends one tick a request, and keeps nothing of it."""

    max_batch = 1

    def __init__(
        self, *, client: RemoteWriteClient, settings: RemoteWriteSettings, clock: Clock
    ) -> None:
        self.receiver = shown_url(settings.url)
        self._client, self._settings, self._clock = client, settings, clock
        self._limits, self._tenants = AgeLimits.of(settings), Tenants(settings.tenants)
        # The series of the sink: with its labels, and under others' names.
        self._values = TickValues(sent=settings.sent_labels, aliases=settings.aliases)

    @override
    async def deliver(self, batch: Sequence[RefusedEvent]) -> Refusals:
        """Send each tick that is neither older nor further ahead than the settings allow."""
        return [await self._send(each) for each in batch]

    async def _send(self, refused: RefusedEvent) -> str | None:
        if (refusal := self._refusal_of(refused.event)) is not None:
            return refusal
        # Of nothing that was sent before: what a tick does not have shall end no series.
        series = ActiveSeries(external_labels=self._settings.external_labels, tenants=self._tenants)
        try:
            encoded = series.encode(self._samples_of(refused))
        except ValueError as error:
            return f"invalid: {error}"
        # To each tenant: those that have its part already say so, or take it once more.
        answers = [await self._send_part(part) for part in encoded.by_tenant()]
        refusals = [answer for answer in answers if answer is not None]
        if len(refusals) < len(answers):
            # Of several tenants it was refused by some: the others have it, and newer ones.
            refusals = [refusal for refusal in refusals if not is_behind_newer(refusal)]
        return "; ".join(refusals) or None

    async def _send_part(self, encoded: EncodedTick) -> str | None:
        try:
            written = await self._client.write(encoded, attempt=0)
        except RejectedError as error:
            return str(error)
        if written < encoded.samples:
            return f"the receiver says to have written {written} of {encoded.samples} samples"
        return None

    def _refusal_of(self, event: GpuEvent) -> str | None:
        ahead_ns, limits = event.time_ns - self._clock.time_ns(), self._limits
        if ahead_ns > limits.max_ahead_ns:
            seconds = ahead_ns / NS_PER_SECOND
            return f"future: {seconds:.0f} s ahead, more than remote_write.max_future_seconds"
        if limits.max_age_ns is not None and -ahead_ns > limits.max_age_ns:
            seconds = -ahead_ns / NS_PER_SECOND
            return f"too_old: {seconds:.0f} s old, more than remote_write.max_age_seconds"
        return None

    def _samples_of(self, refused: RefusedEvent) -> IntervalSamples:
        """Return what is sent of a tick; raises ValueError where it points to what is not there."""
        event = refused.event
        return IntervalSamples(
            node=node_key(event),
            time_ns=event.time_ns,
            values=self._values.values_of(event, None),
            record=refused.record,
            is_past=True,
        )

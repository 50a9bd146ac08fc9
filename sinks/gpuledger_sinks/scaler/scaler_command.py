"""Runs the scaler: follows the events of all partitions without a group, and serves KEDA."""

import asyncio
import ssl
from collections.abc import Iterable
from typing import Final

import structlog

from gpuledger.bus.protocol import Bus, HistoryReader, Record, Span, TopicPartition
from gpuledger.certificates import Validity
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.errors import BusError, UndecodableError, UserError
from gpuledger.keys import split_key
from gpuledger.records import GpuEvent
from gpuledger.runtime import CheckSeverity, Readiness, RetryingCaller
from gpuledger.runtime.file_watch import FilesInForce, FileWatch
from gpuledger.runtime.http.web_config import TlsServerConfig, make_context
from gpuledger.runtime.logs import Repeats
from gpuledger.settings.groups import parse_listen
from gpuledger_sinks.metrics import DROPPED_TOTAL, LAG_SECONDS, count_scaler_from_zero
from gpuledger_sinks.registry import SCALER
from gpuledger_sinks.scaler.external_scaler import ExternalScaler, ScalerServer
from gpuledger_sinks.scaler.workload_use import Metric, UnknownUseError, Workload, WorkloadUse
from gpuledger_sinks.settings import ScalerSettings

READ_INTERVAL_SECONDS: Final = 1.0
"""Pause between two reads of new events."""
_log = structlog.get_logger(__name__)


async def run_scaler(
    *, bus: Bus, settings: ScalerSettings, readiness: Readiness, clock: Clock | None = None
) -> None:
    """Follow the events and serve KEDA until cancelled."""
    clock = clock or SystemClock()
    count_scaler_from_zero()
    check = readiness.check(f"{SCALER}.kafka")
    retrying = RetryingCaller(on=BusError, check=check, receiver="all partitions read", clock=clock)
    async with bus.reader() as reader:
        follower = Follower(bus=bus, reader=reader, settings=settings, clock=clock)
        LAG_SECONDS.labels(sink=SCALER).set_function(follower.lag_seconds)
        server = ScalerServer(ExternalScaler(use=follower.use, wait=follower.wait))
        host, port = parse_listen(settings.listen)
        context = _tls_context(settings, readiness=readiness, clock=clock)
        try:
            await server.start(host, port, ssl=context)
        except OSError as error:
            raise UserError(
                f"scaler.listen: cannot listen on {settings.listen}: {error.strerror or error};"
                " choose another address (GPULEDGER_SCALER__LISTEN)"
            ) from error
        async with server:
            while True:
                await retrying(follower.read)
                await clock.sleep(READ_INTERVAL_SECONDS)


class Follower:
    """Keeps the use of workloads up to date with the events of all partitions."""

    def __init__(
        self, *, bus: Bus, reader: HistoryReader, settings: ScalerSettings, clock: Clock
    ) -> None:
        self._reader, self._clock = reader, clock
        self._topic = bus.topics.events
        self._decoder = Decoder(topic=self._topic.name, record=GpuEvent)
        self._window_ns = round(settings.window_seconds * NS_PER_SECOND)
        self._cluster = settings.cluster
        self._uses = WorkloadUse(
            cluster=settings.cluster,
            window_seconds=settings.window_seconds,
            stale_after_seconds=settings.stale_after_seconds,
            max_workloads=settings.max_workloads,
        )
        self._positions: dict[TopicPartition, int] = {}
        self._started_ns = clock.time_ns()
        self._complete_ns: int | None = None
        """Time at which the last read of all partitions began; `None` before the first."""
        self._changed = asyncio.Event()
        self._repeats = Repeats()

    def lag_seconds(self) -> float:
        """Return the time since all partitions were read to their end."""
        return (self._clock.time_ns() - (self._complete_ns or self._started_ns)) / NS_PER_SECOND

    def use(self, workload: Workload, metric: Metric) -> float:
        """Return the use of a workload; raise `UnknownUseError` unless all partitions are read."""
        if self._complete_ns is None or self.lag_seconds() * NS_PER_SECOND > self._window_ns:
            raise UnknownUseError(f"not all partitions of {self._topic.name} have been read")
        return self._uses.total(workload, metric, self._clock.time_ns())

    async def wait(self) -> None:
        """Wait until events have been read."""
        await self._changed.wait()

    async def read(self) -> None:
        """Read the new events of each partition; after a pause, only those in the window."""
        begun_ns = self._clock.time_ns()
        if self.lag_seconds() * NS_PER_SECOND > self._window_ns:
            self._positions.clear()
        spans = await self._reader.spans(self._topic.name)
        if new := spans.keys() - self._positions.keys():
            since_ms = (begun_ns - self._window_ns) // NS_PER_MS
            found = await self._reader.offsets_at(new, since_ms)
            # Without records in the window, the offset is the end, which may have moved since.
            self._positions |= {at: min(found[at], spans[at].end) for at in new}
        for at, span in spans.items():
            known = self._positions[at]
            # Retention may have removed the position, or the topic was recreated.
            first = known if span.first <= known <= span.end else span.first
            if first < span.end:
                async for records in self._reader.read(at, Span(first, span.end)):
                    self._take(records)
            self._positions[at] = span.end
        self._uses.forget_stale(begun_ns)
        self._complete_ns = begun_ns
        self._changed.set()
        # Only current waiters wake: the next ones wait for the next read.
        self._changed = asyncio.Event()

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            # Decoding takes most of the time, so events of other clusters are skipped before it, by
            # the cluster at the start of the key.
            key = (record.key or b"").decode(errors="replace")
            if key and split_key(key)[0] != self._cluster:
                continue
            try:
                event = self._decoder.decode(record.value)
                left_out = self._uses.take(event, self._clock.time_ns())
                reason, error = "too_many", "more workloads than scaler.max_workloads"
            except (UndecodableError, ValueError) as invalid:
                # Other sinks write the dead letter. The node counts as unresponsive.
                reason, error, left_out = "invalid", str(invalid), 1
            DROPPED_TOTAL.labels(sink=SCALER, reason=reason).inc(left_out)
            if left_out and (count := self._repeats.count(reason, more=left_out)):
                _log.warning("scaler_use_dropped", key=key, count=count, error=error)


def _tls_context(
    settings: ScalerSettings, *, readiness: Readiness, clock: Clock
) -> ssl.SSLContext | None:
    """Return the TLS context; each connection uses the files that are then in force."""
    if settings.cert_file is None or settings.key_file is None:
        return None
    authorities = settings.client_ca_file
    config = TlsServerConfig(
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        client_auth_type="RequireAndVerifyClientCert" if authorities else "NoClientCert",
        client_ca_file=authorities,
    )
    current: ssl.SSLContext

    def load() -> list[Validity]:
        nonlocal current
        current, validities = make_context(config, prefix="scaler.")
        current.set_alpn_protocols(["h2"])
        if authorities:
            current.verify_mode = ssl.CERT_REQUIRED
        return validities

    def follow(connection: ssl.SSLObject, *_: object) -> None:
        files.look()
        connection.context = current

    watch = FileWatch(
        filter(None, (config.cert_file, config.key_file, authorities)),
        monotonic=lambda: clock.monotonic_ns() / NS_PER_SECOND,
    )
    check = readiness.check(f"{SCALER}.certificate", severity=CheckSeverity.WARNING)
    validities = load()  # sets `current`
    files = FilesInForce(
        load, validities=validities, watch=watch, check=check, on_read=lambda _: None
    )
    readiness.add_periodic(files.look, check=check)
    current.sni_callback = follow  # called in each handshake, also if the client sends no name
    return current

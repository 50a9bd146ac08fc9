"""KEDA gets the use of a workload, and an error if the use is not known."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from structlog.testing import capture_logs

from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import Readiness
from gpuledger_sinks.metrics import DROPPED_TOTAL, LAG_SECONDS, SCALER_REQUESTS_TOTAL
from gpuledger_sinks.scaler.external_scaler import ExternalScaler, ScalerServer
from gpuledger_sinks.scaler.scaler_command import Follower, run_scaler
from gpuledger_sinks.scaler.workload_use import AbsentError, Metric, UnknownUseError, Workload
from gpuledger_sinks.settings import ScalerSettings
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of
from tests.real.services.certificates import Authority, KeyPair
from tests.real.services.ports import free_ports
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    ManualClock,
    bus,
    entry,
    event,
    eventually,
    pod,
    publish,
    running,
)
from tests.unit.sinks.scaler.keda import Keda, connected, reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from gpuledger.bus.memory import MemoryBus
    from gpuledger.bus.protocol import HistoryReader, Span, TopicPartition

TRAIN = Workload("research", "StatefulSet", "train")
METADATA = {"scalerAddress": "scaler:9826", "target": "0.7", "ownerKind": "StatefulSet"}


class Known:
    """The known use of the workload `train`, which the test changes."""

    def __init__(self, value: float | UnknownUseError = 1.5) -> None:
        self.value = value
        self._changed = asyncio.Event()

    def use(self, workload: Workload, metric: Metric) -> float:
        if workload != TRAIN:
            raise AbsentError("no pod")
        if isinstance(self.value, Exception):
            raise self.value
        return self.value if metric == "gpus" else 7.0

    async def wait(self) -> None:
        await self._changed.wait()

    async def change(self, value: float | UnknownUseError) -> None:
        self.value = value
        self._changed.set()
        self._changed = asyncio.Event()
        for _ in range(5):
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(known: Known, folder: Path) -> AsyncIterator[Keda]:
    server = ScalerServer(ExternalScaler(use=known.use, wait=known.wait))
    await server.start(path=str(folder / "scaler.sock"))
    async with server, connected(path=str(folder / "scaler.sock")) as keda:
        yield keda


async def test_keda_gets_the_use_the_target_and_the_activity(tmp_path: Path) -> None:
    async with serving(Known(1.5), tmp_path) as keda:
        of = reference(METADATA)

        assert await keda.spec(of) == {"gpus": 0.7}
        assert await keda.metrics(of) == {"gpus": 1.5}
        assert await keda.metrics(reference(METADATA | {"metric": "memory"})) == {"memory": 7.0}
        assert await keda.is_active(of)
        assert await keda.is_active(reference(METADATA | {"activationTarget": "1.4"}))
        assert not await keda.is_active(reference(METADATA | {"activationTarget": "1.5"}))


async def test_the_namespace_is_that_of_the_scaled_object(tmp_path: Path) -> None:
    async with serving(Known(), tmp_path) as keda:
        other = METADATA | {"ownerName": "train"}
        assert await keda.metrics(reference(other, name="chat")) == {"gpus": 1.5}
        for wrong in (reference(METADATA, name="chat"), reference(METADATA, namespace="serving")):
            with pytest.raises(GRPCError) as caught:
                await keda.metrics(wrong)
            assert caught.value.status is Status.NOT_FOUND


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": "0"}, "target"),
        ({"target": "nan"}, "target"),
        ({"target": "inf"}, "target"),
        ({"target": "much"}, "target"),
        ({"activationTarget": "-1"}, "activationTarget"),
        ({"metric": "power"}, "metric"),
        ({"activationThreshold": "1"}, "activationThreshold"),
    ],
)
async def test_a_mistake_in_a_trigger_is_reported(
    change: dict[str, str], named: str, tmp_path: Path
) -> None:
    async with serving(Known(), tmp_path) as keda:
        before = value_of(SCALER_REQUESTS_TOTAL.labels(status="invalid"))
        with pytest.raises(GRPCError, match=named) as caught:
            await keda.spec(reference(METADATA | change))

        assert caught.value.status is Status.INVALID_ARGUMENT
        assert value_of(SCALER_REQUESTS_TOTAL.labels(status="invalid")) == before + 1


async def test_unknown_use_is_an_error_and_never_0(tmp_path: Path) -> None:
    async with serving(Known(UnknownUseError("node node-a is unresponsive")), tmp_path) as keda:
        for call in (keda.metrics, keda.is_active):
            with pytest.raises(GRPCError, match="node-a") as caught:
                await call(reference(METADATA))
            assert caught.value.status is Status.UNAVAILABLE


async def test_each_activation_is_pushed_once(tmp_path: Path) -> None:
    known = Known(0.0)
    async with (
        serving(known, tmp_path) as keda,
        keda.pushed(reference(METADATA | {"activationTarget": "0.5"})) as pushed,
    ):
        assert await keda.is_active(reference(METADATA)) is False
        silent, absent = UnknownUseError("silent"), AbsentError("no pods")
        for value in (0.4, 0.6, 0.7, silent, 0.8, 0.0, 2.0, absent, absent, 1.0):
            await known.change(value)
            await keda.spec(reference(METADATA))
        assert [await anext(pushed) for _ in range(3)] == [True] * 3
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                pytest.fail(f"pushed once more: {await anext(pushed)}")


async def test_many_scaled_objects_may_wait_on_one_connection(tmp_path: Path) -> None:
    """Also more than 100, the limit of h2."""
    async with serving(Known(0.0), tmp_path) as keda, AsyncExitStack() as stack:
        assert await keda.metrics(reference(METADATA)) == {"gpus": 0.0}
        async with asyncio.timeout(HANG_SECONDS):
            for _ in range(150):
                await stack.enter_async_context(keda.pushed(reference(METADATA)))
            assert await keda.metrics(reference(METADATA)) == {"gpus": 0.0}


class FailingReader:
    """A reader that fails once it is told to."""

    def __init__(self, inner: object) -> None:
        self._inner, self.fails = inner, False

    def __getattr__(self, name: str) -> object:
        if self.fails:
            raise BusUnavailableError("no broker")
        return getattr(self._inner, name)


@asynccontextmanager
async def following(
    on: MemoryBus, clock: ManualClock
) -> AsyncIterator[tuple[Follower, FailingReader]]:
    async with on.reader() as inner:
        reader = FailingReader(inner)
        yield Follower(bus=on, reader=reader, settings=ScalerSettings(), clock=clock), reader  # type: ignore[arg-type]  # stands in for a reader


async def test_only_complete_and_fresh_partitions_give_the_use() -> None:
    on, clock = bus(), ManualClock()
    async with following(on, clock) as (follower, reader):
        await publish(on, event(-20), event(-1), event(0))
        with pytest.raises(UnknownUseError, match="partitions"):
            follower.use(TRAIN, "gpus")
        await follower.read()
        assert follower.use(TRAIN, "gpus") == 0.5

        clock.advance(1)
        await publish(on, event(1, entries=[entry(busy_ns=0)]))
        await follower.read()
        assert follower.use(TRAIN, "gpus") == pytest.approx(1 / 3)
        reader.fails = True
        with pytest.raises(BusUnavailableError):
            await follower.read()
        clock.advance(14)
        assert follower.use(TRAIN, "gpus") == 0.0
        clock.advance(2)
        assert follower.lag_seconds() == 16
        with pytest.raises(UnknownUseError, match="partitions"):
            follower.use(TRAIN, "gpus")


async def test_after_an_outage_only_the_window_is_read() -> None:
    on, clock = bus(), ManualClock()
    async with following(on, clock) as (follower, _):
        await follower.read()
        await publish(on, b"unreadable", *(event(tick) for tick in range(100)))
        clock.advance(100)
        before = value_of(DROPPED_TOTAL.labels(sink="scaler", reason="invalid"))
        await follower.read()

        assert value_of(DROPPED_TOTAL.labels(sink="scaler", reason="invalid")) == before
        assert follower.use(TRAIN, "gpus") == 0.5


class RacingReader:
    """A reader after whose query of spans something happens."""

    def __init__(self, inner: HistoryReader, then: Callable[[], Awaitable[object]]) -> None:
        self._inner, self._then = inner, then

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        found = await self._inner.spans(topic)
        await self._then()
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


async def test_old_events_are_not_read_if_a_late_one_arrives_between_two_queries() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, b"unreadable", event(0))
    clock.advance(100)
    async with on.reader() as inner:
        reader = RacingReader(inner, lambda: publish(on, event(10)))
        follower = Follower(bus=on, reader=reader, settings=ScalerSettings(), clock=clock)  # type: ignore[arg-type]  # stands in for a reader
        before = value_of(DROPPED_TOTAL.labels(sink="scaler", reason="invalid"))
        await follower.read()

        assert value_of(DROPPED_TOTAL.labels(sink="scaler", reason="invalid")) == before


async def test_records_and_pods_that_are_left_out_are_counted_and_logged() -> None:
    on, clock = bus(), ManualClock()
    settings = ScalerSettings(max_workloads=1)
    dropped = [DROPPED_TOTAL.labels(sink="scaler", reason=one) for one in ("invalid", "too_many")]
    before = [*map(value_of, dropped)]
    others = event(1, pods=[pod(owner_name="other")], node="node-b")
    async with on.reader() as reader:
        follower = Follower(bus=on, reader=reader, settings=settings, clock=clock)
        await publish(on, b"{", event(entries=[entry(container=77)]), event(1), node=NODE)
        clock.advance(1)
        with capture_logs() as logged:
            await follower.read()
            await publish(on, others)
            await follower.read()

        assert [*map(value_of, dropped)] == [before[0] + 2, before[1] + 1]
        assert follower.use(TRAIN, "gpus") == 0.5
    assert [(one["event"], one["key"]) for one in logged] == [
        ("scaler_use_dropped", "default/node-a"),
        ("scaler_use_dropped", "default/node-b"),
    ]
    assert "max_workloads" in logged[1]["error"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_the_scaler_uses_the_certificates_that_are_now_in_its_files(
    host: str, tmp_path: Path
) -> None:
    """A client needs a certificate of an authority that is still in the file."""
    first, second = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    used = KeyPair(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")
    clients = tmp_path / "ca.crt"

    def client(pair: KeyPair | None, *, trusts: Authority) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=trusts.certificate)
        context.set_alpn_protocols(["h2"])
        if pair:
            context.load_cert_chain(pair.certificate, pair.key)
        return context

    def put(authority: Authority) -> KeyPair:
        """Write the scaler's files, and return the pair, which is also a client's."""
        pair = authority.issue("scaler")
        for file, to in zip(
            (pair.certificate, pair.key, authority.certificate),
            (used.certificate, used.key, clients),
            strict=True,
        ):
            to.write_bytes(file.read_bytes())
        return pair

    (port,) = free_ports(1)
    settings = ScalerSettings(
        listen=f"127.0.0.1:{port}",
        cert_file=used.certificate,
        key_file=used.key,
        client_ca_file=clients,
    )
    readiness, on, of = Readiness(), bus(), reference(METADATA)

    async def is_served(context: ssl.SSLContext) -> bool:
        async with connected(host=host, port=port, ssl=context) as keda:
            try:
                return await keda.spec(of) == {"gpus": 0.7}
            except (OSError, StreamTerminatedError):
                return False

    old = put(first)
    async with running(
        run_scaler(bus=on, settings=settings, readiness=readiness, clock=ManualClock())
    ):
        await eventually(lambda: "all partitions read" in str(readiness.report()))
        assert await is_served(client(old, trusts=first))
        assert not await is_served(client(None, trusts=first))
        assert not await is_served(client(second.issue("client"), trusts=first))

        new = put(second)
        assert await is_served(client(new, trusts=second))
        assert not await is_served(client(old, trusts=second))
    assert value_of(LAG_SECONDS.labels(sink="scaler")) <= 2 * SECOND_NS


async def test_the_check_of_the_scaler_reports_expired_authorities_of_clients(
    tmp_path: Path,
) -> None:
    authority = Authority(folder=tmp_path)
    pair, expired = (
        authority.issue("scaler"),
        authority.issue("old", lifetime=-dt.timedelta(minutes=1)),
    )
    (port,) = free_ports(1)
    settings = ScalerSettings(
        listen=f"127.0.0.1:{port}",
        cert_file=pair.certificate,
        key_file=pair.key,
        client_ca_file=expired.certificate,
    )
    readiness = Readiness()
    async with running(
        run_scaler(bus=bus(), settings=settings, readiness=readiness, clock=ManualClock())
    ):
        await eventually(lambda: "scaler.client_ca_file" in str(readiness.report()))

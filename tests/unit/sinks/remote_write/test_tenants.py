"""Series by tenant: each goes to that of its namespace, or to the one that all share."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import pytest

from gpuledger.ledger.dcgm import DcgmSeries
from gpuledger.ledger.series import values_of
from gpuledger.records import Account, GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.tenants import Tenants
from gpuledger_sinks.remote_write.wire import Version
from gpuledger_sinks.settings import TenantSettings
from tests.unit.sinks.builders import (
    SECOND_NS,
    bus,
    dead_letters,
    entry,
    event,
    eventually,
    holder,
    pod,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Received, Receiver, receiving
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.oracle import Series, parse, parse_compressed
from tests.unit.sinks.remote_write.sending import is_committed, sink

SETTINGS: Final = TenantSettings(of_namespace="team-{namespace}", shared="gpus")
SHARED: Final = "gpus"


def busy_and_held(tick: int = 0, **changes: Any) -> GpuEvent:  # noqa: ANN401  # as event takes them
    """Return an event of a GPU that the namespace research uses, and ops holds."""
    entries = [entry(held_ns=0), entry(Account.IDLE, held_ns=SECOND_NS, holder=0)]
    return event(tick, entries=entries, held_by=[holder(namespace="ops")], **changes)


def namespace_in(series: Series) -> str:
    return series.label("namespace") or series.label("holder_namespace") or ""


def by_tenant(received: list[Received]) -> Mapping[str, list[Series]]:
    found: defaultdict[str, list[Series]] = defaultdict(list)
    for request in received:
        found[request.headers["X-Scope-OrgID"]] += parse_compressed(request.body)
    return found


def test_each_series_is_its_namespaces_and_what_is_of_none_is_shared() -> None:
    of_all = ActiveSeries(tenants=Tenants(SETTINGS)).encode(samples_of(busy_and_held()))
    parts = {part.tenant: parse(part.encode(Version.V1)) for part in of_all.by_tenant()}

    assert parts.keys() == {"team-research", "team-ops", SHARED}
    for tenant, series in parts.items():
        of = {f"team-{name}" if name else SHARED for name in map(namespace_in, series)}
        assert of == {tenant}
    together = parse(of_all.encode(Version.V1))
    assert sorted(chain.from_iterable(parts.values())) == sorted(together)
    assert sum(part.samples for part in of_all.by_tenant()) == of_all.samples == len(together)


def test_a_tick_like_the_last_goes_to_the_same_tenants() -> None:
    series = ActiveSeries(tenants=Tenants(SETTINGS))
    for tick in range(3):
        encoded = series.encode(samples_of(busy_and_held(tick)))
        assert {part.tenant for part in encoded.by_tenant()} == {
            "team-research",
            "team-ops",
            SHARED,
        }


def test_a_device_under_others_names_is_that_namespaces_whose_pod_it_names() -> None:
    tick, tenants = event(entries=[entry()]), Tenants(SETTINGS)
    groups = [*DcgmSeries("hostname").values_of(tick, {}), *values_of(tick)]

    for group in groups:
        labels = dict(zip(group.family.labels, group.label_values, strict=True))
        namespace = labels.get("namespace") or labels.get("holder_namespace")
        expected = f"team-{namespace}" if namespace else SHARED
        assert tenants.tenant_of("default", group) == expected


@pytest.mark.parametrize("namespace", ["a\r\nX: 1", "a b", "é", "a" * 200, "a|b", "../x"])
def test_a_namespace_that_can_be_no_tenant_is_nobodys(namespace: str) -> None:
    tick = event(entries=[entry()], pods=[pod(namespace=namespace)])
    encoded = ActiveSeries(tenants=Tenants(SETTINGS)).encode(samples_of(tick))

    assert {part.tenant for part in encoded.by_tenant()} == {SHARED}


def test_a_receiver_that_has_one_tenant_is_told_of_none() -> None:
    encoded = ActiveSeries().encode(samples_of(busy_and_held()))

    assert [part.tenant for part in encoded.by_tenant()] == [""]


def sending(on: Any, receiver: Receiver) -> "asyncio.Future[None]":  # noqa: ANN401  # the bus
    return sink(on, receiver, tenants=SETTINGS)


async def test_what_goes_to_the_tenants_is_all_that_one_tenant_would_have() -> None:
    on = bus()
    await publish(on, *map(busy_and_held, range(5)))
    async with receiving() as receiver, running(sending(on, receiver)):
        await eventually(is_committed(on, 5))
        of_tenants = by_tenant(receiver.received)
    async with receiving() as alone, running(sink(on, alone, group="alone")):
        await eventually(lambda: len(_series(alone)) == sum(map(len, of_tenants.values())))

    assert sorted(chain.from_iterable(of_tenants.values())) == sorted(_series(alone))


def _series(receiver: Receiver) -> list[Series]:
    return [one for request in receiver.received for one in parse_compressed(request.body)]


async def test_what_one_tenant_refuses_the_others_have() -> None:
    on = bus()
    await publish(on, *map(busy_and_held, range(4)))

    def answer(body: bytes) -> Answer:
        is_refused = any(map(_is_of_ops, parse_compressed(body)))
        return Answer(400, "limit of series", {"Content-Type": "text/plain"}) if is_refused else OK

    async with receiving(by_body=answer) as receiver, running(sending(on, receiver)):
        await eventually(is_committed(on, 4))
    of_tenants = by_tenant(receiver.received)
    for tenant in ("team-research", SHARED):
        times = sorted({one.time_ms for one in of_tenants[tenant]})
        assert len(times) >= 4
    letters = await dead_letters(on)
    assert {letter.offset for letter in letters} == {0, 1, 2, 3}
    assert {letter.reason for letter in letters} == {"rejected"}


OK: Final = Answer(204)


def _is_of_ops(series: Series) -> bool:
    return namespace_in(series) == "ops"


async def test_the_end_of_a_pods_series_goes_to_its_tenant() -> None:
    on = bus()
    await publish(on, busy_and_held(0), event(1, entries=[entry(Account.IDLE)]))
    async with receiving() as receiver, running(sending(on, receiver)):
        await eventually(is_committed(on, 2))

    ended = [one for one in by_tenant(receiver.received)["team-research"] if one.value != one.value]
    assert ended
    assert {namespace_in(one) for one in ended} == {"research"}

"""Requests to the kubelet, on a clock that a test moves."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuFacts, GpuReading, NodeSample
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.host.kubelet.allocations import Allocations
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.host.kubelet.messages import KubeletError
from gpuledger_agent.host.kubelet.shares.pod_shares import PodShares
from gpuledger_agent.host.node_pods import PodEnds, PodFolders
from gpuledger_agent.settings import AllocationsSettings, KubeletSettings
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from tests.examples import examples
from tests.unit.agent.host.kubelet.oracle import (
    AllocatableResourcesResponse,
    ListPodResourcesResponse,
)

GPU, OTHER = "GPU-0", "GPU-1"
FORMER, NEXT = (f"0000000{digit}-7d52-4b8e-a1f4-9c0d2e5b7a63" for digit in (1, 2))


def facts(uuid: str) -> GpuFacts:
    return GpuFacts(uuid=uuid, index=0, instances=[], capabilities=[])


BOTH = DeviceIndex.of([facts(GPU), facts(OTHER)])


def answer(*device_ids: str) -> bytes:
    return answer_of(chat=device_ids)


def answer_of(**pods: Sequence[str]) -> bytes:
    """Return a response with the device ids of each pod."""
    listed: list[dict[str, Any]] = []
    for name, ids in pods.items():
        devices = [{"resource_name": "nvidia.com/gpu", "device_ids": list(ids)}]
        containers = [{"name": "server", "devices": devices}]
        listed.append({"name": name, "namespace": "serving", "containers": containers})
    written: bytes = ListPodResourcesResponse(pod_resources=listed).SerializeToString()
    return written


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class FakeKubelet:
    """Answers or fails as a test sets, and counts requests."""

    def __init__(self, given: bytes | str) -> None:
        self.given = given
        self.requests = 0
        self.allocatable: bytes | str = "unimplemented"
        self.allocatable_requests = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def list_pods(self) -> bytes:
        self.requests += 1
        await self.may_answer.wait()
        if isinstance(self.given, str):
            raise KubeletError(self.given)
        return self.given

    async def list_allocatable(self) -> bytes:
        self.allocatable_requests += 1
        if isinstance(self.allocatable, str):
            raise KubeletError(self.allocatable)
        return self.allocatable


class Bench:
    def __init__(
        self,
        given: bytes | str,
        *,
        enabled: bool | Literal["auto"] = "auto",
        shares: PodShares | None = None,
    ) -> None:
        self.clock = ManualClock(start_ns=1_795_000_000_000_000_000)
        self.has_changed = False
        self.folders = [f"serving_chat_{FORMER}"]
        self.cgroups = {FORMER}
        self.kubelet = FakeKubelet(given)
        self.check = Check()
        self.allocations = Allocations(
            kubelet=self.kubelet,
            clock=self.clock,
            check=self.check,
            backoff=Backoff(jitter=lambda: 1.0),
            settings=KubeletSettings(enabled=enabled, cache_ttl_seconds=60),
            ends=PodEnds(
                PodFolders(
                    list_folders=lambda: self.folders,
                    list_cgroups=lambda: self.cgroups,
                    has_cgroup=lambda uid: uid in self.cgroups,
                    clock=self.clock,
                )
            ),
            have_pods_changed=lambda: self.has_changed,
            shares=shares,
        )

    def allocated(self, devices: DeviceIndex = BOTH) -> list[str]:
        return [one.device_id for one in self.allocations.current(devices)]

    def is_ready(self) -> bool:
        return self.check.is_ok

    async def tick(self) -> None:
        """Begin a tick, and wait for its requests."""
        self.allocations.request_if_due()
        await self.allocations.wait_answer(0)
        await settle()

    async def advance(self, seconds: float, *, sampling_interval_seconds: float = 1.0) -> None:
        for _ in range(round(seconds / sampling_interval_seconds)):
            self.clock.advance(sampling_interval_seconds)
            await self.tick()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.allocations.run())
        await self.tick()
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize("sampling_interval_seconds", [0.25, 0.9995, 1.0, 1.0005, 5.0])
async def test_the_kubelet_is_queried_in_the_first_tick_and_every_ten_seconds(
    sampling_interval_seconds: float,
) -> None:
    bench = Bench(answer(GPU))
    assert bench.allocated() == []
    async with bench.running():
        assert (bench.kubelet.requests, bench.allocated()) == (1, [GPU])
        await bench.advance(100, sampling_interval_seconds=sampling_interval_seconds)
    assert bench.kubelet.requests in (10, 11)


@pytest.mark.parametrize("sampling_interval_seconds", [0.9995, 1.0, 1.0005])
async def test_new_pods_have_their_allocations_in_the_tick_that_notices_them(
    sampling_interval_seconds: float,
) -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        await bench.advance(3, sampling_interval_seconds=sampling_interval_seconds)
        for allocated in ([GPU, OTHER], [OTHER], [], [GPU]):
            bench.kubelet.given, bench.has_changed = answer(*allocated), True
            requested = bench.kubelet.requests
            await bench.advance(
                sampling_interval_seconds, sampling_interval_seconds=sampling_interval_seconds
            )
            assert (bench.allocated(), bench.kubelet.requests) == (allocated, requested + 1)
        bench.has_changed = False
        requested = bench.kubelet.requests
        await bench.advance(5)
        assert bench.kubelet.requests == requested


@pytest.mark.parametrize("sampling_interval_seconds", [0.5, 1.0])
@pytest.mark.parametrize("device", [GPU, OTHER])
async def test_the_next_pod_of_a_name_has_its_allocation_before_its_volumes_are_mounted(
    device: str, sampling_interval_seconds: float
) -> None:
    """As in a StatefulSet: the next pod has no log directory yet, and the former one has one."""
    bench = Bench(answer(GPU))
    async with bench.running():
        await bench.advance(3)
        assert bench.allocated() == [GPU]
        bench.cgroups, bench.has_changed = {NEXT}, True
        bench.kubelet.given = answer(device)
        for _ in range(60):
            interval = sampling_interval_seconds
            await bench.advance(interval, sampling_interval_seconds=interval)
            assert bench.allocated() == [device]
            bench.has_changed = False
        bench.folders.append(f"serving_chat_{NEXT}")
        await bench.advance(20)
        assert bench.allocated() == [device]
        bench.cgroups = {"00000003-7d52-4b8e-a1f4-9c0d2e5b7a63"}
        assert bench.allocated() == []


async def test_an_ended_pod_has_no_allocation_although_one_deleted_by_force_has_its_name() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        bench.cgroups = {FORMER, NEXT}
        bench.folders.append(f"serving_chat_{NEXT}")
        bench.kubelet.given, bench.has_changed = answer(OTHER), True
        await bench.advance(1)
        bench.has_changed = False
        assert bench.allocated() == [OTHER]
        bench.cgroups = {FORMER}
        await bench.advance(1)
        assert bench.allocated() == [], "the kubelet still lists the next pod"


async def test_changes_of_processes_update_allocations_in_the_next_tick() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        await bench.advance(3)
        bench.kubelet.given = answer(GPU, OTHER)
        bench.allocations.refresh_soon()
        assert bench.allocated() == [GPU]
        await bench.advance(1)
        assert bench.allocated() == [GPU, OTHER]


async def test_the_kubelet_is_queried_at_most_twice_a_second() -> None:
    bench = Bench(answer(GPU))
    bench.has_changed = True
    async with bench.running():
        await bench.advance(10, sampling_interval_seconds=0.25)
    assert bench.kubelet.requests == 21


async def test_one_request_runs_at_a_time_and_changes_meanwhile_cause_another_one() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        bench.kubelet.may_answer.clear()
        await bench.advance(15)
        assert (bench.kubelet.requests, bench.allocated()) == (2, [GPU])
        bench.has_changed = True
        await bench.advance(1)
        bench.has_changed = False
        await bench.advance(1)
        assert bench.kubelet.requests == 2
        bench.kubelet.given = answer(OTHER)
        bench.kubelet.may_answer.set()
        await settle()
        await bench.advance(1)
        assert (bench.kubelet.requests, bench.allocated()) == (3, [OTHER])


async def test_changes_do_not_speed_up_retries_of_a_failing_kubelet() -> None:
    bench = Bench("refused")
    async with bench.running():
        for _ in range(400):
            bench.allocations.refresh_soon()
            await bench.advance(0.25, sampling_interval_seconds=0.25)
    assert bench.kubelet.requests < 12


@pytest.mark.parametrize("reason", ["missing", "forbidden", "unimplemented", "refused"])
async def test_a_node_without_a_kubelet_is_ready_and_its_check_explains_why(reason: str) -> None:
    bench = Bench(reason)
    async with bench.running():
        await bench.advance(200)
        assert bench.check.is_ok
        assert "samples have no allocations" in bench.check.detail
        assert bench.allocated() == []


async def test_an_agent_that_requires_a_kubelet_is_not_ready_without_one() -> None:
    bench = Bench("missing", enabled=True)
    async with bench.running():
        assert not bench.check.is_ok


async def test_the_last_response_is_used_for_a_limited_time() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        bench.kubelet.given = "refused"
        await bench.advance(50)
        assert bench.allocated() == [GPU]
        assert bench.is_ready()
        assert "the last response is still used" in bench.check.detail
        await bench.advance(60)
        assert bench.allocated() == []
        assert not bench.is_ready()
        bench.kubelet.given = answer(OTHER)
        await bench.advance(31)
        assert bench.allocated() == [OTHER]
        assert bench.is_ready()


@pytest.mark.parametrize(
    ("starting", "allocated"),
    [
        pytest.param({}, {"chat": [GPU, OTHER]}, id="no pods"),
        pytest.param({"static": []}, {"chat": [GPU, OTHER]}, id="static pods only"),
        pytest.param(
            {"next": [GPU]}, {"next": [GPU], "chat": [OTHER]}, id="a device given to another pod"
        ),
        pytest.param({"chat": [GPU]}, {"chat": [GPU]}, id="the pod with fewer devices"),
    ],
)
async def test_a_running_pod_that_the_kubelet_does_not_list_keeps_the_devices_that_no_other_has(
    starting: Mapping[str, Sequence[str]], allocated: Mapping[str, list[str]]
) -> None:
    bench = Bench(answer(GPU, OTHER))

    def devices() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for one in bench.allocations.current(BOTH):
            found.setdefault(one.pod, []).append(one.device_id)
        return found

    async with bench.running():
        assert devices() == {"chat": [GPU, OTHER]}
        bench.kubelet.given = answer_of(**starting)
        await bench.advance(30)
        assert devices() == allocated
        bench.cgroups = {NEXT}
        bench.folders = [f"serving_next_{NEXT}"]
        await bench.advance(30)
        others = {pod: list(ids) for pod, ids in starting.items() if ids and pod != "chat"}
        assert devices() == others, "the pod has ended"


@pytest.mark.parametrize("starting", [{}, {"static": [OTHER]}])
async def test_allocations_are_unknown_until_a_starting_kubelet_lists_the_running_pods(
    starting: Mapping[str, Sequence[str]],
) -> None:
    """Also if the kubelet starts again later: then the last devices are known."""
    bench = Bench(answer_of(**starting))
    async with bench.running():
        for _ in range(10):
            assert bench.allocations.are_unknown
            await bench.advance(1)
        bench.kubelet.given = answer_of(**starting, chat=[GPU])
        await bench.advance(1)
        assert not bench.allocations.are_unknown
        bench.kubelet.given = answer_of(**starting)
        await bench.advance(20)
        assert not bench.allocations.are_unknown


async def test_allocations_are_known_if_the_pods_that_the_kubelet_omits_have_ended() -> None:
    bench = Bench(answer_of())
    bench.cgroups = {NEXT}
    async with bench.running():
        assert not bench.allocations.are_unknown


async def test_an_invalid_response_is_a_failure_and_the_last_one_is_used() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        bench.kubelet.given = b"\x0a\x05ab"
        await bench.advance(15)
        assert bench.allocated() == [GPU]
        assert "not a pod list" in bench.check.detail


async def test_a_new_gpu_gets_its_allocations_without_a_new_request() -> None:
    bench = Bench(answer(GPU, OTHER))
    async with bench.running():
        assert bench.allocated(DeviceIndex.of([facts(GPU)])) == [GPU]
        assert bench.allocated() == [GPU, OTHER]
        assert bench.kubelet.requests == 1


async def test_the_check_names_a_device_that_matches_no_gpu_of_the_node() -> None:
    bench = Bench(answer(GPU, OTHER))
    async with bench.running():
        bench.allocated(DeviceIndex.of([facts(GPU)]))
        unmatched = f"; matching no GPU of the node: 1, such as nvidia.com/gpu {OTHER} of pod"
        assert unmatched in bench.check.detail
        await bench.advance(15)
        assert unmatched in bench.check.detail
        bench.allocated()
        assert bench.check.detail == "2 devices are allocated to containers"


async def test_allocations_are_recomputed_only_after_a_change() -> None:
    bench = Bench(answer(GPU))
    async with bench.running():
        before = bench.allocations.current(BOTH)
        await bench.advance(30)
        assert bench.allocations.current(DeviceIndex.of([facts(GPU), facts(OTHER)])) is before


def allocatable(*device_ids: str) -> bytes:
    """Return a response in the kubelet's form, with one entry per device."""
    devices = [
        {"resource_name": "nvidia.com/gpu", "device_ids": [device_id]} for device_id in device_ids
    ]
    written: bytes = AllocatableResourcesResponse(devices=devices).SerializeToString()
    return written


async def test_a_replica_has_the_number_of_its_devices_replicas_allocated_or_not() -> None:
    bench = Bench(answer(f"{GPU}::0", OTHER))
    shares = [f"{GPU}::{replica}" for replica in range(4)]
    bench.kubelet.allocatable = allocatable(*shares, OTHER)
    async with bench.running():
        assert [one.device_replicas for one in bench.allocations.current(BOTH)] == [4, None]


async def test_the_number_of_replicas_remains_while_no_device_plugin_is_registered() -> None:
    bench = Bench(answer(f"{GPU}::0"))
    bench.kubelet.allocatable = allocatable(f"{GPU}::0", f"{GPU}::1")
    async with bench.running():
        bench.kubelet.allocatable = allocatable()
        await bench.advance(70)
        assert bench.kubelet.allocatable_requests > 1
        assert [one.device_replicas for one in bench.allocations.current(BOTH)] == [2]


@pytest.mark.parametrize("failure", ["unimplemented", "deadline", b"\xff"])
async def test_without_allocatable_devices_the_number_of_replicas_is_absent(
    failure: bytes | str,
) -> None:
    bench = Bench(answer(f"{GPU}::0"))
    bench.kubelet.allocatable = failure
    async with bench.running():
        assert [one.device_replicas for one in bench.allocations.current(BOTH)] == [None]
        assert bench.is_ready()


async def test_allocatable_devices_are_queried_once_a_minute_and_kept_during_failures() -> None:
    bench = Bench(answer(f"{GPU}::0"))
    bench.kubelet.allocatable = allocatable(f"{GPU}::0", f"{GPU}::1")
    async with bench.running():
        await bench.advance(50)
        assert bench.kubelet.allocatable_requests == 1
        bench.kubelet.allocatable = "deadline"
        await bench.advance(20)
        assert bench.kubelet.allocatable_requests == 2
        assert [one.device_replicas for one in bench.allocations.current(BOTH)] == [2]


@pytest.mark.parametrize(
    ("response", "enabled", "is_unknown"),
    [
        (answer(GPU), "auto", False),
        (answer(), "auto", False),
        ("missing", "auto", False),
        ("missing", True, True),
        ("refused", "auto", True),
        ("forbidden", "auto", True),
        ("deadline", "auto", True),
        (b"\x0a\x05ab", "auto", True),
    ],
    ids=[
        "a kubelet that allocated a GPU",
        "a kubelet that allocated nothing",
        "no socket, so perhaps no kubelet",
        "no socket of a required kubelet",
        "a kubelet that is stopped",
        "a socket that the agent may not open",
        "a kubelet that does not answer",
        "a kubelet whose answer is invalid",
    ],
)
async def test_allocations_are_unknown_until_the_kubelet_of_a_node_answers(
    response: bytes | str, *, enabled: bool | Literal["auto"], is_unknown: bool
) -> None:
    bench = Bench(response, enabled=enabled)
    async with bench.running():
        await bench.advance(200)
        assert bench.allocations.are_unknown == is_unknown


@pytest.mark.parametrize("is_reserved", [True, False])
async def test_the_rest_of_a_node_is_unknown_until_the_shares_of_reserved_gpus_are_read(
    *, is_reserved: bool
) -> None:
    namespaces = ("serving",) if is_reserved else ()
    shares = PodShares(
        AllocationsSettings(placeholder_namespaces=namespaces),
        check=Check(),
        pod_list_check=Check(),
    )
    bench = Bench(answer(GPU), shares=shares)
    async with bench.running():
        assert bench.allocated() == ([] if is_reserved else [GPU])
        assert bench.allocations.are_unknown == is_reserved
        shares.take_pods([])
        assert bench.allocated() == ([] if is_reserved else [GPU])
        assert not bench.allocations.are_unknown
        bench.kubelet.given = "refused"
        await bench.advance(100)
        assert bench.allocated() == []
        assert bench.allocations.are_unknown


@pytest.mark.parametrize("before", [answer(GPU), b"\x0a\x05ab", "refused", "forbidden", "deadline"])
async def test_a_kubelet_that_was_there_does_not_become_absent(before: bytes | str) -> None:
    bench = Bench(before)
    async with bench.running():
        await bench.advance(100)
        bench.kubelet.given = "missing"
        await bench.advance(100)
        assert bench.allocations.are_unknown


TTL_SECONDS = 60


@examples(40)
@given(
    phases=st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from([answer(GPU), answer(), "refused"])),
        min_size=1,
        max_size=6,
    )
)
def test_allocated_unallocated_and_unknown_time_add_up_to_the_devices_time(
    phases: list[tuple[int, bytes | str]],
) -> None:
    """Unknown is exactly the time in which the last answer is older than it may be."""
    booked, expected = asyncio.run(_played(phases))
    assert booked == expected


async def _played(
    phases: list[tuple[int, bytes | str]],
) -> tuple[Counter[str], Counter[str]]:
    bench = Bench(phases[0][1])
    booked, expected = Counter[str](), Counter[str]()
    answered_ns, last = None, phases[0][1]
    async with bench.running():
        for seconds, given in phases:
            bench.kubelet.given = given
            for _ in range(seconds):
                before = bench.kubelet.requests
                await bench.advance(1)
                now_ns = bench.clock.monotonic_ns()
                if bench.kubelet.requests > before and isinstance(given, bytes):
                    answered_ns, last = now_ns, given
                elif answered_ns is None and isinstance(phases[0][1], bytes):
                    # Answered in the first tick, before the clock moved.
                    answered_ns = now_ns - NS_PER_SECOND
                sample = a_sample(
                    allocations=bench.allocations.current(BOTH),
                    allocations_unknown=bench.allocations.are_unknown or None,
                )
                for books in book_tick(sample):
                    for entry in books.entries:
                        whom = "unknown" if entry.allocation_unknown else "unallocated"
                        whom = whom if entry.allocation is None else "allocated"
                        booked[f"{books.reading.uuid} {whom}"] += entry.allocated_ns or 0
                is_old = answered_ns is None or now_ns - answered_ns > TTL_SECONDS * NS_PER_SECOND
                is_allocated = last == answer(GPU)
                whom = "unknown" if is_old else "allocated" if is_allocated else "unallocated"
                expected[f"{GPU} {whom}"] += NS_PER_SECOND
                whom = "unknown" if is_old else "unallocated"
                expected[f"{OTHER} {whom}"] += NS_PER_SECOND
    return booked, expected


def a_sample(**fields: Any) -> NodeSample:  # noqa: ANN401  # any field
    return NodeSample(
        cluster="default",
        node="n",
        boot_id="b",
        seq=1,
        time_ns=1,
        interval_ns=NS_PER_SECOND,
        gpus=[GpuReading(uuid=GPU, index=0), GpuReading(uuid=OTHER, index=1)],
        processes=[],
        containers=[],
        **fields,
    )

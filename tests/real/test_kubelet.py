"""The agent's requests to the kubelet, against Kubernetes' own API and gRPC's server in Go."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuledger.clock import SystemClock
from gpuledger.records import GpuFacts
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.host.kubelet.allocations import (
    MAX_ANSWER_BYTES,
    MIN_SECONDS,
    Allocations,
    SocketKubelet,
)
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.host.kubelet.messages import (
    ClaimedDevice,
    KubeletError,
    PodResources,
    parse_answer,
)
from gpuledger_agent.host.node_pods import PodCgroups, PodChanges, list_folder
from gpuledger_agent.settings import KubeletSettings
from tests.real.services.kubelet import KubeletServer

GPU = "GPU-5a5a7118-e550-79a1-597e-7631e126c57a"
POD_UID = "3f6b1a52-7d52-4b8e-a1f4-9c0d2e5b7a63"
TRAINING: dict[str, Any] = {
    "name": "llm-finetune-worker-0",
    "namespace": "research",
    "containers": [
        {
            "name": "pytorch",
            "devices": [
                {
                    "resourceName": "nvidia.com/gpu",
                    "deviceIds": [GPU, f"{GPU}::3"],
                    "topology": {"nodes": [{"ID": "1"}]},
                }
            ],
            "cpuIds": ["1", "2", "130"],
            "memory": [{"memoryType": "memory", "size": "4294967296"}],
            "dynamicResources": [
                {
                    "claimName": "one-gpu",
                    "claimNamespace": "research",
                    "claimResources": [
                        {
                            "cdiDevices": [{"name": "k8s.gpu.nvidia.com/claim=1-gpu-0"}],
                            "driverName": "gpu.nvidia.com",
                            "poolName": "gpu-node-1",
                            "deviceName": "gpu-0",
                            "shareId": "a1",
                        }
                    ],
                }
            ],
        },
        {"name": "sidecar"},
    ],
}


def kubelet_at(socket: Path, *, deadline_seconds: float = 5.0) -> SocketKubelet:
    return SocketKubelet(socket, timeout_seconds=deadline_seconds)


async def reason_of(socket: Path, *, deadline_seconds: float = 5.0) -> str:
    with pytest.raises(KubeletError) as caught:
        await kubelet_at(socket, deadline_seconds=deadline_seconds).list_pods()
    return caught.value.reason


async def names_of(kubelet: SocketKubelet) -> Sequence[str]:
    return [pod.name for pod in parse_answer(await kubelet.list_pods())]


async def test_every_device_of_the_kubelets_answer_is_read(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    server.answer([TRAINING, {"name": "plain", "namespace": "default"}])
    training, plain = parse_answer(await kubelet_at(server.socket).list_pods())

    pytorch, sidecar = training.containers
    assert (training.namespace, training.name) == ("research", "llm-finetune-worker-0")
    assert [one.device_ids for one in pytorch.devices] == [[GPU, f"{GPU}::3"]]
    assert [(one.namespace, one.name) for one in pytorch.claims] == [("research", "one-gpu")]
    assert pytorch.claims[0].devices == [
        ClaimedDevice(
            driver_name="gpu.nvidia.com",
            pool_name="gpu-node-1",
            device_name="gpu-0",
            share_id="a1",
        )
    ]
    assert (sidecar.name, sidecar.devices, sidecar.claims) == ("sidecar", [], [])
    assert plain == PodResources(name="plain", namespace="default", containers=[])


async def test_a_node_without_pods_has_an_empty_answer(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    assert await names_of(kubelet_at(start_kubelet().socket)) == []


async def test_a_restarted_kubelet_is_queried_again_on_the_same_path(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    server.answer([TRAINING])
    kubelet = kubelet_at(server.socket)
    assert await names_of(kubelet) == ["llm-finetune-worker-0"]
    server.kill()
    assert await reason_of(server.socket) == "refused"
    server.start()
    assert await names_of(kubelet) == ["llm-finetune-worker-0"]
    server.stop()
    assert await reason_of(server.socket) == "missing"


async def test_a_request_to_a_kubelet_that_does_not_answer_in_time_is_abandoned(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    server.delay("30s")
    assert await reason_of(server.socket, deadline_seconds=0.2) == "deadline"
    server.resume()
    assert await names_of(kubelet_at(server.socket)) == []


async def test_a_refusal_is_reported_with_the_kubelets_error(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    server.refuse("RESOURCE_EXHAUSTED", "rejected by rate limit")
    with pytest.raises(KubeletError, match="rejected by rate limit") as caught:
        await kubelet_at(server.socket).list_pods()
    assert caught.value.reason == "exhausted"
    server.refuse("UNIMPLEMENTED", "unknown service v1.PodResourcesLister")
    assert await reason_of(server.socket) == "unimplemented"


async def test_an_answer_of_many_frames_is_read_whole(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    pods = [{**TRAINING, "name": f"pod-{number}"} for number in range(20_000)]
    server.answer(pods)
    answer = await kubelet_at(server.socket).list_pods()

    assert len(answer) > MAX_ANSWER_BYTES / 4
    assert [pod.name for pod in parse_answer(answer)] == [pod["name"] for pod in pods]


async def test_an_answer_larger_than_the_limit_is_rejected(
    start_kubelet: Callable[[], KubeletServer],
) -> None:
    server = start_kubelet()
    server.answer([{"name": "x" * (MAX_ANSWER_BYTES // 4), "namespace": "n"}] * 5)
    with pytest.raises(KubeletError, match=f"larger than {MAX_ANSWER_BYTES} bytes") as caught:
        await kubelet_at(server.socket).list_pods()

    assert caught.value.reason == "too_large"


async def test_a_tick_that_detects_a_pod_by_its_cgroup_has_its_devices(
    start_kubelet: Callable[[], KubeletServer], tmp_path: Path
) -> None:
    server, cgroups, logs = start_kubelet(), tmp_path / "cgroup", tmp_path / "pods"
    burstable = cgroups / "kubepods.slice" / "kubepods-burstable.slice"
    burstable.mkdir(parents=True)
    logs.mkdir()
    settings = KubeletSettings(socket=server.socket, refresh_seconds=600)
    allocations = Allocations(
        kubelet=kubelet_at(server.socket),
        clock=SystemClock(),
        check=Check(),
        backoff=Backoff(),
        settings=settings,
        have_pods_changed=PodChanges(
            list_folder(logs), PodCgroups(cgroups).list_names
        ).have_changed,
    )
    gpu = GpuFacts(uuid=GPU, index=0, instances=[], capabilities=[])
    devices = DeviceIndex.of([gpu])
    async with run_tasks(allocations.run()):
        allocations.request_if_due()
        await allocations.wait_answer(60)
        assert allocations.current(devices) == []
        server.answer([TRAINING])
        (burstable / f"kubepods-burstable-pod{POD_UID.replace('-', '_')}.slice").mkdir()
        # As soon as the next tick of a second may begin.
        await asyncio.sleep(MIN_SECONDS)
        allocations.request_if_due()
        await allocations.wait_answer(60)
        assert {one.pod for one in allocations.current(devices)} == {"llm-finetune-worker-0"}

"""Podwatch decodes containers' requests for GPUs."""

from typing import Any

import pytest

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import ContainerRequest, PodRecord
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from tests.default_topics import PODS
from tests.unit.enricher.podwatch.builders import Object, encoded, pod, reader_of

PREFIXES = PodwatchSettings().gpu_resource_prefixes


def read(item: Object, *, prefixes: list[str] = PREFIXES) -> PodRecord:
    found = reader_of(gpu_resource_prefixes=prefixes).read(encoded(item))
    assert found is not None
    return found


def container(name: str = "main", **more: Any) -> Object:  # noqa: ANN401  # any field
    return {"name": name, **more}


def asking(amounts: Object, *, kind: str = "limits") -> Object:
    return container(resources={kind: {"cpu": "4", "memory": "1Gi", **amounts}})


def requested(item: Object, **section: object) -> ContainerRequest | None:
    """Return the requests of a pod's only container."""
    (found,) = read(pod(spec={"containers": [item], **section})).containers
    return found.requested


@pytest.mark.parametrize(
    "amounts",
    [
        pytest.param({"nvidia.com/gpu": 2}, id="GPUs"),
        pytest.param({"nvidia.com/gpu.shared": 1}, id="replicas"),
        pytest.param({"nvidia.com/mig-1g.10gb": 3}, id="MIG"),
        pytest.param(
            {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, id="HAMi"
        ),
        pytest.param({"aliyun.com/gpu-mem": 8, "aliyun.com/gpu-core.percentage": 40}, id="Alibaba"),
        pytest.param(
            {
                "volcano.sh/vgpu-number": 1,
                "volcano.sh/vgpu-memory": 3000,
                "volcano.sh/vgpu-cores": 5,
            },
            id="Volcano",
        ),
        pytest.param({"volcano.sh/gpu-memory": 1024}, id="Volcano, formerly"),
    ],
)
@pytest.mark.parametrize("kind", ["limits", "requests"])
def test_amounts_are_those_of_the_spec_by_resource_name(amounts: dict[str, int], kind: str) -> None:
    texts = {name: str(amount) for name, amount in amounts.items()}
    assert requested(asking(texts, kind=kind)) == ContainerRequest(resources=amounts)


@pytest.mark.parametrize("amounts", [{}, {"amd.com/gpu": "1"}, {"nvidia.com/gpu": "0"}])
def test_a_container_without_a_gpu_has_no_request(amounts: Object) -> None:
    assert requested(asking(amounts)) is None
    assert requested(container()) is None


def test_a_setting_selects_the_resources_that_are_gpus() -> None:
    item = pod(spec={"containers": [asking({"amd.com/gpu": "1", "nvidia.com/gpu": "1"})]})
    (found,) = read(item, prefixes=["amd.com/"]).containers
    assert found.requested == ContainerRequest(resources={"amd.com/gpu": 1})


def test_each_container_has_its_requests_and_its_kind() -> None:
    """So that a reader can sum them for a pod as the scheduler does."""
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {
        "initContainers": [
            container("fetch", **gpu),
            container("proxy", restartPolicy="Always", **gpu),
        ],
        "containers": [container("main", **gpu), container("side")],
        "ephemeralContainers": [container("debug")],
    }
    found = read(pod(spec=spec, status={"containerStatuses": []}))
    one = ContainerRequest(resources={"nvidia.com/gpu": 1})
    assert [(each.name, each.kind, each.requested) for each in found.containers] == [
        ("fetch", "init", one),
        ("proxy", "sidecar", one),
        ("main", None, one),
        ("side", None, None),
        ("debug", "ephemeral", None),
    ]
    assert found.containers[0].requested is found.containers[2].requested
    assert Decoder(topic=PODS.name, record=PodRecord).decode(encode(found)) == found


def needs(cpu: object = None, memory: object = None, **more: str) -> Object:
    """Return a container that requests CPU and memory."""
    given = {"cpu": cpu, "memory": memory}
    requests = {name: amount for name, amount in given.items() if amount is not None}
    return container(resources={"requests": requests}, **more)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"containers": [container()]}, (0, 0), id="no requests"),
        pytest.param({"containers": [needs("1500m", "1Gi")]}, (1500, 2**30), id="one"),
        pytest.param({"containers": [needs(0.5, "1e3"), needs(2)]}, (2500, 1000), id="sum"),
        pytest.param({"containers": [needs("100u", "100m")]}, (1, 1), id="rounded up"),
        pytest.param(
            {"initContainers": [needs(8, "1Mi")], "containers": [needs(2, "2Mi")]},
            (8000, 2 * 2**20),
            id="init",
        ),
        pytest.param(
            {
                "initContainers": [needs(1, restartPolicy="Always"), needs(4)],
                "containers": [needs(2)],
            },
            (5000, 0),
            id="sidecar",
        ),
        pytest.param(
            {"containers": [needs(2, "1k")], "overhead": {"cpu": "250m", "memory": "24"}},
            (2250, 1024),
            id="overhead",
        ),
        pytest.param(
            {"containers": [needs(2, "1k")], "resources": {"requests": {"cpu": "3"}}},
            (3000, 1000),
            id="of the pod",
        ),
        pytest.param({"containers": [needs("9E", "9E")]}, (2**63 - 1, 9 * 10**18), id="highest"),
        pytest.param({"containers": [needs(1), needs("many")]}, (None, None), id="invalid"),
    ],
)
def test_cpu_and_memory_are_what_the_scheduler_counts(
    spec: Object, expected: tuple[int | None, int | None]
) -> None:
    found = read(pod(spec=spec, status={"containerStatuses": []}))
    assert (found.requested_cpu_millicores, found.requested_memory_bytes) == expected


MPS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@pytest.mark.parametrize(
    ("variables", "ratio"),
    [
        ([{"name": MPS, "value": "25"}], 0.25),
        ([{"name": MPS, "value": "100"}], 1.0),
        ([{"name": MPS, "value": "12.5"}], 0.125),
        ([{"name": "A", "value": "b"}, {"name": MPS, "value": "7"}], 0.07),
        ([{"name": MPS, "value": "7"}, {"name": MPS, "value": "9"}], 0.09),
        ([{"name": MPS, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}], None),
        ([{"name": MPS, "value": "$(SHARE)"}], None),
        ([{"name": MPS, "value": "120"}], None),
        ([{"name": MPS, "value": "-5"}], None),
        ([{"name": MPS}], None),
        ([{"name": "NOTE", "value": MPS}], None),
        ([], None),
        (None, None),
    ],
)
def test_the_share_under_mps_is_read_from_the_variable_if_it_is_a_literal(
    variables: list[Object] | None, ratio: float | None
) -> None:
    found = requested(container(env=variables))
    assert (found and found.mps_active_thread_ratio) == ratio


def test_invalid_variables_make_the_pod_unreadable() -> None:
    with pytest.raises(UndecodableError):
        read(pod(spec={"containers": [container(env=[{"name": 5, "value": MPS}])]}))


def test_claims_have_their_own_names_and_not_the_pods_names_for_them() -> None:
    """A claim in the spec has its own name, and one from a template the name in the status."""
    resources = {"claims": [{"name": name} for name in ("own", "made", "waits", "own")]}
    spec = {
        "containers": [container(resources=resources)],
        "resourceClaims": [
            {"name": "own", "resourceClaimName": "shared-gpus"},
            {"name": "made", "resourceClaimTemplateName": "one-gpu"},
            {"name": "waits", "resourceClaimTemplateName": "one-gpu"},
        ],
    }
    statuses = [
        {"name": "made", "resourceClaimName": "pod-u1-made-7xk2p"},
        {"name": "waits", "resourceClaimName": None},
    ]
    (found,) = read(pod(spec=spec, status={"resourceClaimStatuses": statuses})).containers
    assert found.requested == ContainerRequest(
        resources={}, claims=["shared-gpus", "pod-u1-made-7xk2p"]
    )

"""The kubelet's response as encoded by Protocol Buffers' own library."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_agent.host.kubelet.messages import (
    ClaimedDevice,
    ContainerDevices,
    ContainerResources,
    PodResources,
    ResourceClaim,
    parse_answer,
)
from tests.unit.agent.host.kubelet.oracle import ListPodResourcesResponse

texts = st.text(max_size=200)


def lists(*fields: tuple[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(dict(fields)), max_size=3)


topologies = st.fixed_dictionaries({"nodes": lists(("ID", st.integers(-1, 7)))})
memories = lists(
    ("memory_type", texts), ("size", st.integers(0, 2**64 - 1)), ("topology", topologies)
)
cpus = st.lists(st.integers(0, 2**40), max_size=3)
claimed = lists(
    ("cdi_devices", lists(("name", texts))),
    ("driver_name", texts),
    ("pool_name", texts),
    ("device_name", texts),
    ("share_id", texts),
)
claims = lists(("claim_name", texts), ("claim_namespace", texts), ("claim_resources", claimed))
devices = lists(
    ("resource_name", texts), ("device_ids", st.lists(texts, max_size=3)), ("topology", topologies)
)
containers = lists(
    ("name", texts),
    ("devices", devices),
    ("cpu_ids", cpus),
    ("memory", memories),
    ("dynamic_resources", claims),
)
pods = lists(
    ("name", texts),
    ("namespace", texts),
    ("containers", containers),
    ("cpu_ids", cpus),
    ("memory", memories),
)


def expected(pod: dict[str, Any]) -> PodResources:
    return PodResources(
        name=pod["name"],
        namespace=pod["namespace"],
        containers=[expected_container(one) for one in pod["containers"]],
    )


def expected_container(container: dict[str, Any]) -> ContainerResources:
    return ContainerResources(
        name=container["name"],
        devices=[
            ContainerDevices(resource_name=one["resource_name"], device_ids=one["device_ids"])
            for one in container["devices"]
        ],
        claims=[
            ResourceClaim(
                name=claim["claim_name"],
                namespace=claim["claim_namespace"],
                devices=[
                    ClaimedDevice(
                        driver_name=one["driver_name"],
                        pool_name=one["pool_name"],
                        device_name=one["device_name"],
                        share_id=one["share_id"] or None,
                    )
                    for one in claim["claim_resources"]
                ],
            )
            for claim in container["dynamic_resources"]
        ],
    )


@given(pods)
def test_a_protobuf_encoded_response_is_read(given_pods: list[dict[str, Any]]) -> None:
    answer = ListPodResourcesResponse(pod_resources=given_pods).SerializeToString()

    assert parse_answer(answer) == [expected(pod) for pod in given_pods]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_rejected(answer: bytes) -> None:
    try:
        pods = parse_answer(answer)
    except ValueError:
        return
    assert all(isinstance(pod, PodResources) for pod in pods)


@pytest.mark.parametrize(
    "answer",
    [b"\x0a\x05ab", b"\x0a", b"\x80", b"\xff" * 11, b"\x0b", b"\x09\x01", b"\x0a\x03\x0a\x01\xff"],
    ids=["short", "no size", "open number", "long number", "a group", "cut", "no text"],
)
def test_an_invalid_message_is_rejected(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_answer(answer)


def test_unknown_fields_are_skipped() -> None:
    pod = b"\x0a\x01a" + b"\x78\x96\x01" + b"\x79" + b"\0" * 8 + b"\x7d" + b"\0" * 4 + b"\x12\x01n"

    assert parse_answer(b"\x0a" + bytes([len(pod)]) + pod) == [
        PodResources(name="a", namespace="n", containers=[])
    ]

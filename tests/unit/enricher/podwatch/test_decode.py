"""Podwatch decodes the API server's pods."""

from collections.abc import Sequence
from typing import Any

import pytest

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import PodContainer, PodRecord
from gpuledger_enricher.podwatch.decode import PodReader
from gpuledger_enricher.podwatch.pod_facts import parse_amount
from tests.default_topics import PODS
from tests.unit.enricher.podwatch.builders import (
    CREATED_NS,
    Object,
    encoded,
    hex_id,
    owned_by,
    pod,
    reader_of,
)


def read(item: Object, **options: Any) -> PodRecord:  # noqa: ANN401  # options of the reader
    requested = {"labels": ["app"], "gpu_resource_prefixes": ["nvidia.com/"]} | options
    found = PodReader(cluster="default", **requested).read(encoded(item))
    assert found is not None
    return found


def test_a_pod_becomes_a_record_that_every_reader_of_the_topic_can_decode() -> None:
    found = read(pod("u1", version="42"))
    expected = PodRecord(
        cluster="default",
        uid="u1",
        namespace="team-red",
        name="pod-u1",
        node="node-a",
        labels={},
        containers=[PodContainer(name="main", container_id=hex_id("u1"), restarts=0)],
        phase="Running",
        requested_cpu_millicores=0,
        requested_memory_bytes=0,
        created_time_ns=CREATED_NS,
        started_time_ns=CREATED_NS + 10**9,
        resource_version="42",
    )
    assert encode(found) == encode(expected)
    assert Decoder(topic=PODS.name, record=PodRecord).decode(encode(found)) == expected


def test_a_pod_without_a_node_has_no_record() -> None:
    reader = reader_of()
    assert reader.read(encoded(pod(node=None))) is None


@pytest.mark.parametrize(
    ("references", "labels", "expected"),
    [
        ([], {}, (None, None)),
        (
            [owned_by("ReplicaSet", "web-5d4f8c7b9")],
            {"pod-template-hash": "5d4f8c7b9"},
            ("Deployment", "web"),
        ),
        ([owned_by("Job", f"nightly-{CREATED_NS // 60_000_000_000}")], {}, ("CronJob", "nightly")),
        (
            [owned_by("Backup", "b", controller=False), owned_by("RayCluster", "r")],
            {},
            ("RayCluster", "r"),
        ),
    ],
)
def test_the_owner_is_the_workload_that_people_know(
    references: list[Object], labels: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    found = read(pod(metadata={"ownerReferences": references, "labels": labels}))
    assert (found.owner_kind, found.owner_name) == expected


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        (["app"], {"app": "web"}),
        (["team", "app"], {"team": "red", "app": "web"}),
        (["absent"], {}),
        (["*"], {"app": "web", "team": "red", "noise": "1"}),
        ([], {}),
    ],
)
def test_only_the_configured_labels_are_kept(
    requested: list[str], expected: dict[str, str]
) -> None:
    item = pod(metadata={"labels": {"app": "web", "team": "red", "noise": "1"}})
    assert read(item, labels=requested).labels == expected


def test_containers_of_all_kinds_are_named_even_before_they_start() -> None:
    found = read(
        pod(
            spec={
                "initContainers": [{"name": "fetch"}],
                "containers": [{"name": "main"}, {"name": "side"}],
                "ephemeralContainers": [{"name": "debug"}],
            },
            status={
                "initContainerStatuses": [
                    {"name": "fetch", "containerID": f"docker://{hex_id('f1')}", "restartCount": 2}
                ],
                "containerStatuses": [
                    {"name": "side", "containerID": "", "restartCount": 0},
                    {"name": "main", "containerID": f"cri-o://{hex_id('m1')}", "restartCount": 1},
                ],
                "ephemeralContainerStatuses": [
                    {"name": "debug", "containerID": f"containerd://{hex_id('d1')}"}
                ],
            },
        )
    )
    assert [(one.name, one.container_id, one.restarts) for one in found.containers] == [
        ("fetch", hex_id("f1"), 2),
        ("main", hex_id("m1"), 1),
        ("side", None, 0),
        ("debug", hex_id("d1"), 0),
    ]


HASH = "6bfe5d2a8f1b4a33bd0c5e71f2a9c0de"


@pytest.mark.parametrize(
    "written",
    [
        f"containerd://victim-node/{HASH}",
        f"containerd://{HASH}",
        f"containerd://../{'a' * 64}",
        f"containerd://{'a' * 64}\n",
        f"containerd://{'A' * 64}",
        "containerd://",
        "://",
        "a",
    ],
)
def test_a_container_id_that_does_not_have_the_form_of_runtimes_is_ignored(written: str) -> None:
    """The kubelet writes the status, and could write any text there."""
    last = {"terminated": {"containerID": written, "exitCode": 0}}
    status = {"name": "main", "containerID": written, "restartCount": 1, "lastState": last}
    (found,) = read(pod(status={"containerStatuses": [status]})).containers

    assert (found.container_id, found.previous_container_id) == (None, None)


NODE = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "n", "controller": True}


def mirror(
    *,
    config_hash: str | None = HASH,
    config_mirror: str | None = HASH,
    owners: Sequence[Object] = (NODE,),
    account: str | None = None,
) -> Object:
    """Return a static pod's mirror pod, as its kubelet creates it."""
    notes = {"kubernetes.io/config.hash": config_hash, "kubernetes.io/config.mirror": config_mirror}
    return pod(
        metadata={
            "annotations": {name: value for name, value in notes.items() if value is not None},
            "ownerReferences": list(owners),
        },
        spec={"nodeName": "node-a", "serviceAccountName": account, "containers": []},
    )


def test_a_static_pod_has_its_config_hash() -> None:
    assert read(mirror()).config_hash == HASH


NO_MIRRORS: dict[str, Object] = {
    "only the hash": mirror(config_mirror=None),
    "only the mirror annotation": mirror(config_hash=None),
    "two different ones": mirror(config_mirror="f" * 32),
    "both empty": mirror(config_hash="", config_mirror=""),
    "no owner": mirror(owners=[]),
    "another node as owner": mirror(owners=[NODE | {"name": "node-b"}]),
    "an owner of another kind": mirror(owners=[NODE | {"kind": "ReplicaSet"}]),
    "a Node of another API group": mirror(owners=[NODE | {"apiVersion": "example.com/v1"}]),
    "a second owner": mirror(owners=[NODE, NODE | {"kind": "ReplicaSet"}]),
    "a service account, as any pod has": mirror(account="default"),
    "an overlong hash": mirror(config_hash="a" * 65, config_mirror="a" * 65),
    "other annotations": pod(metadata={"annotations": {"other": "x" * 1000}}),
}


@pytest.mark.parametrize("item", NO_MIRRORS.values(), ids=NO_MIRRORS.keys())
def test_a_pod_that_no_kubelet_created_has_no_hash(item: Object) -> None:
    """Anyone who may create pods can write both annotations and name any owner."""
    assert read(item).config_hash is None


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("2", 2),
        ("1k", 1000),
        ("4Gi", 4 * 2**30),
        ("500m", 1),
        ("2e3", 2000),
        ("9223372036854775808", 2**63 - 1),
        ("90000000000G", 2**63 - 1),
        ("", None),
        ("x", None),
        ("1iG", None),
        ("-1", None),
        ("9" * 5000, None),
    ],
)
def test_quantities_are_rounded_up_and_invalid_ones_are_unknown(
    quantity: str, expected: int | None
) -> None:
    assert parse_amount(quantity) == expected


@pytest.mark.parametrize("section", ["spec", "status"])
def test_null_sections_are_ignored(section: str) -> None:
    item = pod() | {section: None}
    reader = reader_of(labels=["app"], gpu_resource_prefixes=["nvidia.com/"])
    found = reader.read(encoded(item))
    assert (found is None) == (section == "spec")


def test_null_fields_are_ignored() -> None:
    found = read(
        pod(
            metadata=dict.fromkeys(
                ["labels", "annotations", "ownerReferences", "creationTimestamp"]
            ),
            status=dict.fromkeys(["phase", "startTime", "containerStatuses"]),
        )
    )
    assert (found.phase, found.created_time_ns, found.started_time_ns) == ("Unknown", 0, None)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"metadata":{}}', b'{"metadata":{"uid":5}}', b"\xff\xfe", b'{"metadata"'],
)
def test_an_object_that_is_not_a_pod_is_refused(data: bytes) -> None:
    with pytest.raises(UndecodableError):
        reader_of().read(data)


def test_a_large_pod_leaves_a_small_record() -> None:
    noise: Object = {"managedFields": [{"fieldsV1": {f"f:{n}": {}}} for n in range(1000)]}
    assert len(encode(read(pod(metadata=noise)))) < 500


def test_pods_of_a_workload_share_their_labels_in_memory() -> None:
    reader = reader_of(labels=["app"])
    first, second, other = (
        reader.read(encoded(pod(uid, metadata={"uid": uid, "labels": {"app": app}})))
        for uid, app in (("a", "web"), ("b", "web"), ("c", "db"))
    )
    assert first is not None
    assert second is not None
    assert other is not None
    assert first.labels is second.labels
    assert other.labels == {"app": "db"}

"""Podwatch decodes nodes and namespaces."""

from typing import Any

import pytest

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import NamespaceRecord, NodeRecord
from gpuledger_enricher.podwatch.decode import NamespaceReader, NodeReader
from gpuledger_enricher.podwatch.kinds import NAMESPACE, NODE
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from tests.default_topics import NAMESPACES, NODES
from tests.errors import has_words
from tests.unit.enricher.podwatch.builders import CREATED, CREATED_NS, Object, encoded

EKS = {
    "node.kubernetes.io/instance-type": "p5.48xlarge",
    "topology.kubernetes.io/zone": "us-east-1a",
    "topology.kubernetes.io/region": "us-east-1",
    "eks.amazonaws.com/nodegroup": "h100",
    "eks.amazonaws.com/capacityType": "SPOT",
}


def item(name: str = "gpu-node-1", **metadata: Any) -> Object:  # noqa: ANN401  # any of metadata
    """Return an object as a server returns it if only metadata is requested."""
    return {
        "metadata": {
            "uid": "u1",
            "name": name,
            "resourceVersion": "42",
            "creationTimestamp": CREATED,
            **metadata,
        }
    }


def node(labels: dict[str, str], **settings: list[str]) -> NodeRecord:
    reader = NODE.reader(PodwatchSettings(**settings))  # type: ignore[arg-type]  # settings that are lists
    found = reader.read(encoded(item(labels=labels)))
    assert found is not None
    return found


def test_a_node_becomes_a_record_that_every_reader_of_the_topic_can_decode() -> None:
    found = node(EKS | {"team": "red", "noise": "1"}, node_labels=["team", "absent"])
    expected = NodeRecord(
        cluster="default",
        uid="u1",
        name="gpu-node-1",
        pool="h100",
        instance_type="p5.48xlarge",
        zone="us-east-1a",
        region="us-east-1",
        capacity_type="spot",
        labels={"team": "red"},
        created_time_ns=CREATED_NS,
        resource_version="42",
    )
    assert encode(found) == encode(expected)
    assert Decoder(topic=NODES.name, record=NodeRecord).decode(encode(found)) == expected


def test_a_node_has_what_the_kubelet_allows_pods_to_request() -> None:
    amounts = {
        "cpu": "63770m",
        "memory": "131886028Ki",
        "pods": "110",
        "nvidia.com/gpu": "8",
        "nvidia.com/mig-1g.10gb": "0",
        "vpc.amazonaws.com/pod-eni": "9",
    }
    found = NODE.reader(PodwatchSettings()).read(
        encoded({**item(), "status": {"allocatable": amounts}})
    )
    assert found is not None
    assert found.allocatable_cpu_millicores == 63_770
    assert found.allocatable_memory_bytes == 131_886_028 * 1024
    assert found.allocatable_resources == {"nvidia.com/gpu": 8, "nvidia.com/mig-1g.10gb": 0}
    assert Decoder(topic=NODES.name, record=NodeRecord).decode(encode(found)) == found


@pytest.mark.parametrize(
    "status", [None, {}, {"allocatable": None}, {"allocatable": {"pods": "1"}}]
)
def test_an_amount_that_a_node_does_not_report_is_absent_and_not_zero(
    status: Object | None,
) -> None:
    found = NODE.reader(PodwatchSettings()).read(encoded({**item(), "status": status}))
    assert found is not None
    assert (found.allocatable_cpu_millicores, found.allocatable_memory_bytes) == (None, None)


@pytest.mark.parametrize(
    ("spec", "expected"), [({"unschedulable": True}, True), ({}, False), (None, None)]
)
def test_a_node_is_cordoned_if_its_spec_contains_that_and_unknown_without_a_spec(
    spec: Object | None, *, expected: bool | None
) -> None:
    found = NODE.reader(PodwatchSettings()).read(encoded({**item(), "spec": spec}))
    assert found is not None
    assert found.unschedulable is expected
    assert Decoder(topic=NODES.name, record=NodeRecord).decode(encode(found)) == found


@pytest.mark.parametrize(
    ("labels", "pool"),
    [
        ({"cloud.google.com/gke-nodepool": "a3"}, "a3"),
        ({"eks.amazonaws.com/nodegroup": "h100"}, "h100"),
        ({"alpha.eksctl.io/nodegroup-name": "own"}, "own"),
        ({"karpenter.sh/nodepool": "gpus"}, "gpus"),
        ({"karpenter.sh/provisioner-name": "old"}, "old"),
        ({"kubernetes.azure.com/agentpool": "gpu", "agentpool": "other"}, "gpu"),
        ({"agentpool": "gpu"}, "gpu"),
        ({"karpenter.sh/nodepool": "gpus", "kubernetes.azure.com/agentpool": "sys"}, "gpus"),
        ({"eks.amazonaws.com/nodegroup": ""}, None),
        ({}, None),
    ],
)
def test_the_pool_is_read_from_the_label_of_the_provider(
    labels: dict[str, str], pool: str | None
) -> None:
    assert node(labels).pool == pool


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"karpenter.sh/capacity-type": "spot"}, "spot"),
        ({"karpenter.sh/capacity-type": "on-demand"}, "on_demand"),
        ({"karpenter.sh/capacity-type": "reserved"}, "reserved"),
        ({"eks.amazonaws.com/capacityType": "SPOT"}, "spot"),
        ({"eks.amazonaws.com/capacityType": "ON_DEMAND"}, "on_demand"),
        ({"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}, "reserved"),
        ({"cloud.google.com/gke-spot": "true"}, "spot"),
        ({"cloud.google.com/gke-preemptible": "true"}, "spot"),
        ({"cloud.google.com/gke-spot": "false"}, None),
        ({"cloud.google.com/gke-provisioning": "standard"}, "on_demand"),
        ({"cloud.google.com/gke-provisioning": "spot"}, "spot"),
        ({"cloud.google.com/gke-provisioning": "flex-start"}, "flex_start"),
        (
            {
                "cloud.google.com/reservation-name": "h100-2026",
                "cloud.google.com/gke-provisioning": "standard",
            },
            "reserved",
        ),
        ({"kubernetes.azure.com/scalesetpriority": "spot"}, "spot"),
        ({"kubernetes.azure.com/scalesetpriority": "regular"}, "on_demand"),
        ({}, None),
    ],
)
def test_the_capacity_type_is_one_word_whatever_the_provider_calls_it(
    labels: dict[str, str], expected: str | None
) -> None:
    assert node(labels).capacity_type == expected


def test_configured_labels_take_precedence_over_those_of_providers() -> None:
    labels = EKS | {
        "example.com/pool": "blue",
        "example.com/machine": "DGX H100",
        "example.com/rack-row": "7",
        "example.com/site": "berlin",
        "example.com/bought": "Bare-Metal",
    }
    found = node(
        labels,
        node_pool_labels=["example.com/absent", "example.com/pool"],
        node_instance_type_labels=["example.com/machine"],
        node_zone_labels=["example.com/rack-row"],
        node_region_labels=["example.com/site"],
        node_capacity_type_labels=["example.com/bought"],
    )
    assert (found.pool, found.instance_type, found.zone, found.region, found.capacity_type) == (
        "blue",
        "DGX H100",
        "7",
        "berlin",
        "bare_metal",
    )


def test_a_namespace_becomes_a_record_with_the_configured_labels_and_annotations() -> None:
    settings = PodwatchSettings(
        namespace_labels=["team"], namespace_annotations=["example.com/cost-center"]
    )
    notes = {"example.com/cost-center": "4711", "noise": "x" * 1000}
    data = encoded(
        item("research", labels={"team": "nlp", "other": "1"}, annotations=notes)
        | {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
    )
    found = NAMESPACE.reader(settings).read(data)
    expected = NamespaceRecord(
        cluster="default",
        uid="u1",
        name="research",
        labels={"team": "nlp"},
        annotations={"example.com/cost-center": "4711"},
        created_time_ns=CREATED_NS,
        resource_version="42",
    )
    assert found == expected
    decoder = Decoder(topic=NAMESPACES.name, record=NamespaceRecord)
    assert decoder.decode(encode(expected)) == expected


def test_an_object_that_is_being_deleted_has_the_time_of_its_deletion() -> None:
    data = encoded(item("research", deletionTimestamp=CREATED))
    for reader in (
        NamespaceReader(
            cluster="default",
        ),
        NodeReader(
            cluster="default",
        ),
    ):
        found = reader.read(data)
        assert found is not None
        assert (found.deletion_time_ns, found.deleted_time_ns) == (CREATED_NS, None)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (encoded(item("Not A Name")), "a node"),
        (encoded(item("")), "a node"),
        (encoded(item(uid="")), "a node"),
        (b"{}", "a node"),
        (encoded(item("n" * 64)), "a namespace"),
        (encoded(item(labels=5)), "a namespace"),
    ],
)
def test_an_object_of_another_kind_is_refused(data: bytes, what: str) -> None:
    reader = (
        NodeReader(
            cluster="default",
        )
        if what == "a node"
        else NamespaceReader(
            cluster="default",
        )
    )
    with pytest.raises(UndecodableError, check=has_words(what)):
        reader.read(data)

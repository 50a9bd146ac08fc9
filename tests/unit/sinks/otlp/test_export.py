"""Export requests: the series of the remote-write sink, as the official classes read them."""

import json

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.codec import Decoder, encode
from gpuledger.ledger.series import values_of
from gpuledger.records import Account, GpuBooks, GpuEvent, NodeDescription
from gpuledger_sinks import otlp_names as naming
from gpuledger_sinks.otlp import ExportRequests
from gpuledger_sinks.settings import Encoding
from tests.errors import has_words
from tests.unit.sinks.builders import GPU, NODE, START_NS, entry, event, holder, pod, reading
from tests.unit.sinks.events import events
from tests.unit.sinks.otlp.decoded import Point, points_in, points_of

Series = tuple[str, frozenset[tuple[str, str]]]


def made(one: GpuEvent, encoding: Encoding = "otlp_proto") -> list[bytes]:
    return ExportRequests(encoding=encoding, attributes={}).of(one)


def points(one: GpuEvent) -> list[Point]:
    return points_of(made(one))


def sent_by_remote_write(one: GpuEvent) -> dict[Series, float]:
    """Return the samples that the remote-write sink sends of the event, by name and labels."""
    return {
        (metric.name, frozenset(zip(group.family.labels, group.label_values, strict=True))): value
        for group, values in values_of(one).items()
        for metric, value in zip(group.family.metrics, values, strict=True)
        # What describes stands on the resources, and is no metric.
        if value is not None and not group.family.is_description
    }


def as_series(point: Point, families: dict[Series, float]) -> Series:
    """Return the point's name and labels as the remote-write sink has them."""
    back = {
        attribute: label
        for names in (naming.RESOURCE_ATTRIBUTES, naming.POINT_ATTRIBUTES)
        for label, attribute in names.items()
    }
    of_owners = {naming.OWNER_KIND, naming.OWNER_NAME}
    labels = {
        (back[name], value)
        for name, value in point.attributes | point.resource
        if name in back and name not in of_owners
    }
    for name, wanted in families:
        is_it = {pair for pair in wanted if pair[1]} == labels
        # Its unit comes behind it, where it has one.
        if is_it and f"{name}_".startswith(point.name.replace(".", "_") + "_"):
            return name, wanted
    raise AssertionError(point)


@settings(max_examples=30, deadline=None)
@given(events())
def test_the_points_are_the_samples_that_the_remote_write_sink_sends(one: GpuEvent) -> None:
    sent = sent_by_remote_write(one)

    found = points(one)

    assert {as_series(point, sent): point.value for point in found} == sent
    assert len(found) == len(sent)
    assert {point.time_ns for point in found} <= {one.time_ns}


@settings(max_examples=30, deadline=None)
@given(events())
def test_no_two_points_of_an_event_are_of_one_series(one: GpuEvent) -> None:
    found = [(point.resource, point.name, point.attributes) for point in points(one)]

    assert len(set(found)) == len(found)


@settings(max_examples=30, deadline=None)
@given(events())
def test_an_event_that_is_read_again_gives_the_same_bytes(one: GpuEvent) -> None:
    decoder: Decoder[GpuEvent] = Decoder(topic="events", record=GpuEvent)

    assert made(decoder.decode(encode(one))) == made(one)


@settings(max_examples=30, deadline=None)
@given(events())
def test_json_says_what_protobuf_says(one: GpuEvent) -> None:
    (binary,), (text,) = made(one), made(one, "otlp_json")

    parsed = json_format.Parse(text, ExportMetricsServiceRequest())

    assert parsed == ExportMetricsServiceRequest.FromString(binary)


def test_json_is_as_otlp_asks_for_and_not_as_protobuf_would() -> None:
    (text,) = made(event(gpus=[energy()]), "otlp_json")
    (resource,) = json.loads(text)["resourceMetrics"][:1]
    metrics = {one["name"]: one for one in resource["scopeMetrics"][0]["metrics"]}

    counter = metrics["gpuledger.gpu.energy.counter"]["sum"]
    assert counter["aggregationTemporality"] == AGGREGATION_TEMPORALITY_CUMULATIVE == 2
    assert counter["dataPoints"][0]["timeUnixNano"] == str(START_NS)


def energy() -> GpuBooks:
    return GpuBooks(reading=reading(energy_total_millijoules=5_500), entries=[])


def test_what_the_driver_counts_is_a_monotonic_sum_and_all_else_a_gauge() -> None:
    (value,) = made(event(gpus=[energy()]))
    request = ExportMetricsServiceRequest.FromString(value)
    (metric,) = [
        metric
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.HasField("sum")
    ]

    assert (metric.name, metric.unit) == ("gpuledger.gpu.energy.counter", "J")
    assert metric.sum.is_monotonic
    assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    assert {point.is_sum for point in points_in(request) if point.unit != "J"} == {False}


def test_readings_stand_under_the_conventions_names_beside_the_ledgers_where_asked_for() -> None:
    one = event(gpus=[energy()])
    with_names = ExportRequests(encoding="otlp_proto", attributes={}, hw_names=True).of(one)

    further = set(points_of(with_names)) - set(points(one))

    assert {(point.name, point.unit, point.is_sum) for point in further} == {
        ("hw.gpu.utilization", "1", False),
        ("hw.gpu.memory.limit", "By", True),
        ("hw.gpu.memory.usage", "By", True),
        ("hw.gpu.memory.utilization", "1", False),
        ("hw.energy", "J", True),
        ("hw.power", "W", False),
        ("hw.temperature", "Cel", False),
    }
    (used,) = [point for point in further if point.name == "hw.gpu.utilization"]
    assert dict(used.attributes) == {
        "hw.id": GPU,
        "hw.type": "gpu",
        "hw.name": "nvidia0",
        "hw.vendor": "NVIDIA",
        "hw.model": "NVIDIA H100 80GB HBM3",
        "hw.gpu.task": "general",
    }
    assert used.attribute("k8s.node.name") == NODE


def test_what_rises_and_falls_is_a_sum_that_is_not_monotonic() -> None:
    made_of = ExportRequests(encoding="otlp_proto", attributes={}, hw_names=True)
    (value,) = made_of.of(event(gpus=[energy()]))
    (resource,) = ExportMetricsServiceRequest.FromString(value).resource_metrics
    sums = {one.name: one.sum for one in resource.scope_metrics[0].metrics if one.HasField("sum")}

    assert {name: one.is_monotonic for name, one in sums.items()} == {
        "gpuledger.gpu.energy.counter": True,
        "hw.energy": True,
        "hw.gpu.memory.limit": False,
        "hw.gpu.memory.usage": False,
    }


def test_a_containers_points_have_its_resource_by_the_semantic_conventions() -> None:
    (busy,) = [one for one in points(event()) if one.name == "gpuledger.pod.gpu.busy"]

    assert dict(busy.resource) == {
        "service.name": "gpuledger",
        "service.instance.id": "default/node-a/uid-train/trainer",
        "k8s.cluster.name": "default",
        "k8s.node.name": NODE,
        "k8s.namespace.name": "research",
        "k8s.pod.name": "train-0",
        "k8s.pod.uid": "uid-train",
        "k8s.container.name": "trainer",
        "k8s.statefulset.name": "train",
        "gpuledger.owner.kind": "StatefulSet",
        "gpuledger.owner.name": "train",
    }
    assert dict(busy.attributes) == {
        "hw.id": reading().uuid,
        "hw.type": "gpu",
    }


OWNERS: list[tuple[str | None, str | None, str | None]] = [
    ("PyTorchJob", "llm", None),
    ("Job", "llm", "k8s.job.name"),
    ("CronJob", "nightly", "k8s.cronjob.name"),
    ("Job", None, None),
    (None, None, None),
]


@pytest.mark.parametrize(("kind", "name", "attribute"), OWNERS)
def test_a_workload_has_the_attribute_of_its_kind_where_the_conventions_have_one(
    kind: str | None, name: str | None, attribute: str | None
) -> None:
    one = event(pods=[pod(owner_kind=kind, owner_name=name)])
    (busy,) = [each for each in points(one) if each.name == "gpuledger.pod.gpu.busy"]

    assert busy.attribute("gpuledger.owner.kind") == kind
    assert busy.attribute("gpuledger.owner.name") == name
    by_kind = {key: value for key, value in busy.resource if key in naming.OWNERS.values()}
    assert by_kind == ({attribute: name} if attribute else {})


def test_what_is_booked_on_no_pod_is_the_nodes_and_idle_names_its_holder() -> None:
    booked = [entry(Account.IDLE, holder=0), entry(Account.HOST)]
    found = [
        point
        for point in points(event(entries=booked, held_by=[holder()]))
        if point.name == "gpuledger.account.gpu.busy"
    ]

    assert {dict(point.resource)["service.instance.id"] for point in found} == {f"default/{NODE}"}
    assert {
        (point.attribute("gpuledger.account"), point.attribute("gpuledger.holder.pod"))
        for point in found
    } == {("idle", "notebook-0"), ("host", None)}


def test_two_pods_on_a_gpu_stay_two_where_only_the_service_of_a_resource_is_kept() -> None:
    """As Prometheus does, unless told to keep more of a resource: `job` and `instance`."""
    booked = [entry(), entry(pod_uid="uid-other", container_id="d" * 64)]
    found = [
        (dict(point.resource)["service.instance.id"], point.name, point.attributes)
        for point in points(event(entries=booked))
    ]

    assert len(set(found)) == len(found)


def test_further_attributes_stand_on_every_resource() -> None:
    one = event()
    found = points_of(
        ExportRequests(
            encoding="otlp_proto", attributes={"deployment.environment.name": "west"}
        ).of(one)
    )

    assert len(found) == len(points(one))
    assert {point.attribute("deployment.environment.name") for point in found} == {"west"}


def test_an_event_too_large_for_one_message_is_cut_and_nothing_of_it_is_lost() -> None:
    gpus = [
        GpuBooks(
            reading=reading(uuid=f"GPU-{gpu}", index=gpu),
            entries=[
                entry(pod_uid=f"uid-{gpu}-{number}", container_id=None) for number in range(100)
            ],
        )
        for gpu in range(20)
    ]
    one = event(gpus=gpus, pods=[])

    values = made(one)

    assert len(values) > 1
    assert all(len(value) + len(NODE) <= MAX_MESSAGE_BYTES for value in values)
    sent = sent_by_remote_write(one)
    assert sum(point.name == "gpuledger.pod.gpu.busy" for point in points_of(values)) == 2000
    assert len(points_of(values)) == len(sent)


def test_a_holder_that_the_event_does_not_list_is_refused_by_its_position() -> None:
    with pytest.raises(ValueError, check=has_words("holder", "3")):
        made(event(entries=[entry(Account.IDLE, holder=3)]))


def test_each_resource_says_what_the_node_is_as_far_as_that_is_known() -> None:
    said = NodeDescription(instance_type="p5.48xlarge", zone="eu-west-1a", region="eu-west-1")
    for point in points(event(node_description=said)):
        assert point.attribute("host.type") == "p5.48xlarge"
        assert point.attribute("cloud.availability_zone") == "eu-west-1a"
        assert point.attribute("cloud.region") == "eu-west-1"
        assert point.attribute("gpuledger.node.pool") is None
    assert all(point.attribute("host.type") is None for point in points(event()))

"""Descriptions have series of their own: methods, pods, namespaces, the node and requests."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.families import (
    ACCOUNT,
    DEVICE,
    GPU_INFO,
    INSTANCE,
    METHOD,
    NAMESPACE_INFO,
    NODE,
    NODE_INFO,
    POD,
    POD_DELETED,
    POD_INFO,
    REQUESTED,
    Family,
)
from gpuledger.ledger.series import (
    EventSeries,
    NodeGroups,
    SentLabels,
    SeriesGroup,
    SeriesValues,
    label_of,
    values_of,
)
from gpuledger.records import (
    BusyMethod,
    Category,
    ContainerRequest,
    EnergyMethod,
    GpuEvent,
    MemoryMethod,
    NamespaceDescription,
    NodeDescription,
    PodDescription,
    PodState,
)
from tests.examples import examples
from tests.unit.sinks.builders import (
    GPU,
    SECOND_NS,
    START_NS,
    books,
    entry,
    event,
    holder,
    pod,
    reading,
)
from tests.unit.sinks.events import events

Values = dict[SeriesGroup, SeriesValues]


def of(family: Family, values: Values) -> list[tuple[dict[str, str], SeriesValues]]:
    """Return the labels that have a value, and the values, of a family's groups."""
    name = family.metrics[0].name
    return [
        (
            {
                label: text
                for label, text in zip(group.family.labels, group.label_values, strict=True)
                if text
            },
            found,
        )
        for group, found in values.items()
        if group.family.metrics[0].name == name
    ]


def labels_of(family: Family, values: Values) -> list[dict[str, str]]:
    return [labels for labels, _ in of(family, values)]


def by_method(method: BusyMethod, tick: int) -> GpuEvent:
    found = books(reading(), entry(), entry(Category.IDLE), busy_method=method)
    return event(tick, gpus=[found])


def test_an_alternating_method_changes_no_value_series() -> None:
    """As a label of the value, it would make a steady 0.5 sum to 1.0 over a minute."""
    methods = (BusyMethod.EXCLUSIVE, BusyMethod.MEMORY_SHARE, BusyMethod.EXCLUSIVE)
    series, known = EventSeries(), NodeGroups()
    ticks = [
        series.values_of(by_method(method, tick), known) for tick, method in enumerate(methods)
    ]

    for family in (POD, ACCOUNT):
        assert len({str(labels_of(family, values)) for values in ticks}) == 1
    assert [
        [one["method"] for one in labels_of(METHOD, values) if one["quantity"] == "busy"]
        for values in ticks
    ] == [["exclusive"], ["memory_share"], ["exclusive"]]


def test_each_quantity_names_the_method_that_attributed_it() -> None:
    found = books(
        reading(energy_millijoules=5, energy_method=EnergyMethod.POWER),
        entry(),
        busy_method=BusyMethod.EXCLUSIVE,
        memory_method=MemoryMethod.SCALED,
        energy_method=None,
    )

    values = values_of(event(gpus=[found]))

    assert of(METHOD, values) == [
        ({"gpu_uuid": GPU, "quantity": quantity, "method": method}, (1.0,))
        for quantity, method in (("busy", "exclusive"), ("memory", "scaled"), ("energy", "power"))
    ]


def test_a_quantity_that_is_unknown_has_no_method() -> None:
    unknown: dict[str, Any] = {"busy_method": None, "memory_method": None, "energy_method": None}

    assert of(METHOD, values_of(event(gpus=[books(reading(), **unknown)]))) == []


def test_a_pod_has_one_info_series_with_its_owner_and_the_configured_labels() -> None:
    made = EventSeries(SentLabels(pods=("app", "example.com/cost-center")))
    labels = {"app": "train", "team": "vision", "example.com/cost-center": "42"}
    two_gpus = [books(reading(uuid=f"GPU-{number}"), entry()) for number in range(2)]

    found = of(POD_INFO, made.values_of(event(gpus=two_gpus, pods=[pod(labels=labels)])))

    assert found == [
        (
            {
                "namespace": "research",
                "pod": "train-0",
                "pod_uid": "uid-train",
                "owner_kind": "StatefulSet",
                "owner_name": "train",
                "label_app": "train",
                "label_example_com_cost_center": "42",
            },
            (1.0,),
        )
    ]


def test_no_pod_label_is_sent_unless_it_is_configured() -> None:
    (labels,) = labels_of(POD_INFO, values_of(event()))

    assert not [name for name in labels if name.startswith("label_")]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("app", "label_app"),
        ("app.kubernetes.io/name", "label_app_kubernetes_io_name"),
        ("2nd-team", "label_2nd_team"),
        ("größe", "label_gr__e"),
    ],
)
def test_a_label_has_the_name_that_kube_state_metrics_gives_it(name: str, label: str) -> None:
    assert label_of(name) == label


STRANGERS = [
    (PodDescription(uid="uid-x", state=PodState.FOREIGN), []),
    (PodDescription(state=PodState.NAMED, namespace="research", name="train-0"), []),
    (PodDescription(uid="uid-x", state=PodState.PENDING), [{"pod_uid": "uid-x"}]),
]


@pytest.mark.parametrize(("described", "reported"), STRANGERS)
def test_only_a_pod_that_its_own_node_reports_with_its_uid_is_described(
    described: PodDescription, reported: list[dict[str, str]]
) -> None:
    """Two series of one UID would make a query that joins them fail."""
    assert labels_of(POD_INFO, values_of(event(entries=[], pods=[described]))) == reported


def test_only_a_deleted_pod_has_the_time_of_its_deletion() -> None:
    gone = pod(uid="uid-gone", name="gone-0", deleted_time_ns=1_795_000_000_500_000_000)
    labels = {"namespace": "research", "pod": "gone-0", "pod_uid": "uid-gone"}

    assert of(POD_DELETED, values_of(event(pods=[pod(), gone]))) == [(labels, (1_795_000_000.5,))]


def test_a_uid_that_occurs_twice_is_described_once() -> None:
    twice = [pod(), pod(name="train-1")]

    assert [one["pod"] for one in labels_of(POD_INFO, values_of(event(pods=twice)))] == ["train-0"]


def test_a_namespace_is_described_if_namespace_labels_are_configured() -> None:
    message = event(namespaces=[NamespaceDescription(name="research", labels={"team": "vision"})])
    made = EventSeries(SentLabels(namespaces=("team", "tier")))

    assert of(NAMESPACE_INFO, values_of(message)) == []
    assert of(NAMESPACE_INFO, made.values_of(message)) == [
        ({"namespace": "research", "label_team": "vision"}, (1.0,))
    ]


def test_a_node_is_described_if_anything_is_known_about_it() -> None:
    message = NodeDescription(pool="a100", region="eu-west-1", labels={"rack": "r7"})
    made = EventSeries(SentLabels(nodes=("rack",)))

    assert of(NODE_INFO, values_of(event())) == []
    assert of(NODE_INFO, made.values_of(event(node_description=message))) == [
        ({"node_pool": "a100", "node_region": "eu-west-1", "label_rack": "r7"}, (1.0,))
    ]


def test_a_containers_requests_have_one_series_for_each_resource() -> None:
    query = ContainerRequest(resources={"nvidia.com/gpu": 2, "nvidia.com/gpumem": 4096})
    who = {
        "namespace": "research",
        "pod": "train-0",
        "pod_uid": "uid-train",
        "container": "trainer",
    }

    found = of(REQUESTED, values_of(event(pods=[pod(requested={"trainer": query})])))

    assert found == [
        (who | {"resource": "nvidia.com/gpu"}, (2.0,)),
        (who | {"resource": "nvidia.com/gpumem"}, (4096.0,)),
    ]


def test_a_device_is_described_even_while_it_does_not_answer() -> None:
    unresponsive = reading(
        uuid="MIG-1",
        parent_uuid=GPU,
        gpu_instance=3,
        compute_instance=0,
        mig_profile="1g.10gb",
        unresponsive=True,
    )

    (labels,) = labels_of(GPU_INFO, values_of(event(gpus=[books(unresponsive)])))

    assert labels == {
        "gpu_uuid": "MIG-1",
        "gpu_index": "0",
        "model": "NVIDIA H100 80GB HBM3",
        "parent_uuid": GPU,
        "gpu_instance": "3",
        "compute_instance": "0",
        "mig_profile": "1g.10gb",
    }


def named(family: Family, values: Values) -> dict[str, float | None]:
    """Return the values of a family's only group by metric name."""
    ((_, found),) = of(family, values)
    return dict(zip((metric.name for metric in family.metrics), found, strict=True))


@pytest.mark.parametrize(("unresponsive", "up"), [(None, 1.0), (True, 0.0)])
def test_a_gpu_that_does_not_answer_is_down(*, unresponsive: bool | None, up: float) -> None:
    values = values_of(event(gpus=[books(reading(unresponsive=unresponsive))]))

    assert named(DEVICE, values)["gpuledger_gpu_up"] == up


def test_each_tick_of_a_node_reports_its_time() -> None:
    assert named(NODE, values_of(event(3, gpus=[], gap_ns=2 * SECOND_NS))) == {
        "gpuledger_node_last_sample_timestamp_seconds": START_NS / SECOND_NS + 3,
        "gpuledger_node_gap_seconds": 2,
    }


def test_each_reading_of_a_gpu_is_the_value_of_its_own_metric() -> None:
    """Values go by position: two that change places would have each other's name."""
    found = books(
        reading(
            utilization_ratio=0.1,
            memory_utilization_ratio=0.2,
            memory_used_bytes=3,
            memory_total_bytes=4,
            memory_reserved_bytes=5,
            power_milliwatts=6_000,
            energy_total_millijoules=7_000,
            temperature_celsius=8,
            sm_clock_hertz=9,
            memory_clock_hertz=10,
        ),
        gap_ns=11 * SECOND_NS,
    )

    assert named(DEVICE, values_of(event(gpus=[found]))) == {
        "gpuledger_gpu_up": 1,
        "gpuledger_gpu_utilization_ratio": 0.1,
        "gpuledger_gpu_memory_utilization_ratio": 0.2,
        "gpuledger_gpu_memory_used_bytes": 3,
        "gpuledger_gpu_memory_total_bytes": 4,
        "gpuledger_gpu_memory_reserved_bytes": 5,
        "gpuledger_gpu_power_watts": 6,
        "gpuledger_gpu_energy_counter_joules_total": 7,
        "gpuledger_gpu_temperature_celsius": 8,
        "gpuledger_gpu_sm_clock_hertz": 9,
        "gpuledger_gpu_memory_clock_hertz": 10,
        "gpuledger_gpu_gap_seconds": 11,
    }


def test_each_reading_of_an_instance_is_the_value_of_its_own_metric() -> None:
    found = books(
        reading(
            uuid="MIG-1",
            parent_uuid=GPU,
            utilization_ratio=0.1,
            memory_used_bytes=2,
            memory_total_bytes=3,
            memory_reserved_bytes=4,
        ),
        gap_ns=5 * SECOND_NS,
    )

    assert named(INSTANCE, values_of(event(gpus=[found]))) == {
        "gpuledger_mig_instance_utilization_ratio": 0.1,
        "gpuledger_mig_instance_memory_used_bytes": 2,
        "gpuledger_mig_instance_memory_total_bytes": 3,
        "gpuledger_mig_instance_memory_reserved_bytes": 4,
        "gpuledger_mig_instance_gap_seconds": 5,
    }


def test_the_index_of_a_device_can_change_without_changing_the_series_booked_on_it() -> None:
    """After the driver was reloaded, another GPU has that index."""
    before, after = (
        values_of(event(gpus=[books(reading(index=index), entry(), entry(Category.IDLE))]))
        for index in (0, 5)
    )

    for family in (POD, ACCOUNT):
        assert labels_of(family, before) == labels_of(family, after) != []


def test_the_allocatee_of_idle_time_is_identified_by_its_uid_once_its_record_has_come() -> None:
    allocated = event(
        entries=[entry(Category.IDLE, allocation=0)], pods=[], allocated_to=[holder()]
    )

    assert [one["allocated_pod_uid"] for one in labels_of(ACCOUNT, values_of(allocated))] == [
        "uid-notebook-0"
    ]


@examples(60)
@given(st.lists(events(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=8))
def test_remembering_the_previous_event_changes_no_value(
    drawn: list[GpuEvent], order: list[int]
) -> None:
    series, known = EventSeries(), NodeGroups()
    for position in (*range(len(drawn)), *order):
        one = drawn[position % len(drawn)]
        assert series.values_of(one, known) == values_of(one)


def test_the_groups_stay_the_same_objects_while_containers_and_gpus_stay_the_same() -> None:
    series, known = EventSeries(), NodeGroups()

    def groups(tick: int, busy_ns: int) -> Iterable[int]:
        return [id(group) for group in series.values_of(now(tick, busy_ns), known)]

    def now(tick: int, busy_ns: int) -> GpuEvent:
        return event(tick, entries=[entry(busy_ns=busy_ns), entry(Category.IDLE)])

    first = list(series.values_of(now(0, 5), known))
    assert groups(1, 7) == [id(group) for group in first]


def test_a_container_that_changes_its_name_at_one_position_gets_another_group() -> None:
    series, known = EventSeries(), NodeGroups()
    series.values_of(event(pods=[pod()]), known)

    after = series.values_of(event(1, pods=[pod(name="train-1")]), known)

    assert [one["pod"] for one in labels_of(POD, after)] == ["train-1"]

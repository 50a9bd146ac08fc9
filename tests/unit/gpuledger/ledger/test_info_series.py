"""What describes is on series of its own: methods, pods, namespaces, the node, requests."""

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
    """Return labels that have a value, and values, of the groups of a family."""
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


def test_a_method_that_alternates_changes_no_series_of_a_value() -> None:
    """As a label of the value, it would make a steady 0.5 be summed as 1.0 over a minute."""
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


def test_each_quantity_says_by_which_method_its_parts_were_found() -> None:
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


def test_what_was_not_found_has_no_method() -> None:
    unknown: dict[str, Any] = {"busy_method": None, "memory_method": None, "energy_method": None}

    assert of(METHOD, values_of(event(gpus=[books(reading(), **unknown)]))) == []


def test_a_pod_says_once_whose_it_is_and_has_the_labels_that_are_asked_for() -> None:
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


def test_no_label_of_a_pod_is_sent_unless_it_is_asked_for() -> None:
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
def test_a_label_is_called_as_kube_state_metrics_calls_it(name: str, label: str) -> None:
    assert label_of(name) == label


STRANGERS = [
    (PodDescription(uid="uid-x", state=PodState.FOREIGN), []),
    (PodDescription(state=PodState.NAMED, namespace="research", name="train-0"), []),
    (PodDescription(uid="uid-x", state=PodState.PENDING), [{"pod_uid": "uid-x"}]),
]


@pytest.mark.parametrize(("described", "reported"), STRANGERS)
def test_a_pod_is_told_of_where_a_query_finds_it_by_its_uid_and_by_its_own_node(
    described: PodDescription, reported: list[dict[str, str]]
) -> None:
    """Two series of one UID would make a query that joins them fail."""
    assert labels_of(POD_INFO, values_of(event(entries=[], pods=[described]))) == reported


def test_a_uid_that_comes_twice_is_told_of_once() -> None:
    twice = [pod(), pod(name="train-1")]

    assert [one["pod"] for one in labels_of(POD_INFO, values_of(event(pods=twice)))] == ["train-0"]


def test_a_namespace_is_told_of_where_labels_of_namespaces_are_asked_for() -> None:
    message = event(namespaces=[NamespaceDescription(name="research", labels={"team": "vision"})])
    made = EventSeries(SentLabels(namespaces=("team", "tier")))

    assert of(NAMESPACE_INFO, values_of(message)) == []
    assert of(NAMESPACE_INFO, made.values_of(message)) == [
        ({"namespace": "research", "label_team": "vision"}, (1.0,))
    ]


def test_a_node_is_told_of_where_something_is_known_of_it() -> None:
    message = NodeDescription(pool="a100", region="eu-west-1", labels={"rack": "r7"})
    made = EventSeries(SentLabels(nodes=("rack",)))

    assert of(NODE_INFO, values_of(event())) == []
    assert of(NODE_INFO, made.values_of(event(node_description=message))) == [
        ({"node_pool": "a100", "node_region": "eu-west-1", "label_rack": "r7"}, (1.0,))
    ]


def test_what_a_container_asks_for_has_a_series_for_each_resource() -> None:
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


def test_a_device_says_what_it_is_also_while_it_does_not_answer() -> None:
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
    """Return the values of the one group of a family by the names of its metrics."""
    ((_, found),) = of(family, values)
    return dict(zip((metric.name for metric in family.metrics), found, strict=True))


@pytest.mark.parametrize(("unresponsive", "up"), [(None, 1.0), (True, 0.0)])
def test_a_gpu_that_does_not_answer_is_down(*, unresponsive: bool | None, up: float) -> None:
    values = values_of(event(gpus=[books(reading(unresponsive=unresponsive))]))

    assert named(DEVICE, values)["gpuledger_gpu_up"] == up


def test_each_tick_of_a_node_says_its_time() -> None:
    assert named(NODE, values_of(event(3, gpus=[], gap_ns=2 * SECOND_NS))) == {
        "gpuledger_node_last_sample_timestamp_seconds": START_NS / SECOND_NS + 3,
        "gpuledger_node_gap_seconds": 2,
    }


def test_each_reading_of_a_gpu_is_the_value_of_its_own_metric() -> None:
    """Values stand by their positions: two that change places would go by each other's name."""
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


def test_the_index_of_a_device_may_change_under_what_is_booked_on_it() -> None:
    """It is another GPU's once the driver was loaded again."""
    before, after = (
        values_of(event(gpus=[books(reading(index=index), entry(), entry(Category.IDLE))]))
        for index in (0, 5)
    )

    for family in (POD, ACCOUNT):
        assert labels_of(family, before) == labels_of(family, after) != []


def test_the_holder_of_what_is_idle_is_found_by_its_uid_where_its_record_has_come() -> None:
    allocated = event(
        entries=[entry(Category.IDLE, allocation=0)], pods=[], allocated_to=[holder()]
    )

    assert [one["allocated_pod_uid"] for one in labels_of(ACCOUNT, values_of(allocated))] == [
        "uid-notebook-0"
    ]


@examples(60)
@given(st.lists(events(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=8))
def test_what_is_known_of_the_event_before_changes_no_value(
    drawn: list[GpuEvent], order: list[int]
) -> None:
    series, known = EventSeries(), NodeGroups()
    for position in (*range(len(drawn)), *order):
        one = drawn[position % len(drawn)]
        assert series.values_of(one, known) == values_of(one)


def test_while_containers_and_gpus_are_the_same_the_groups_are_the_same_objects() -> None:
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

"""A namespace has as many series as its rule says; what is beyond is left out, and named."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.ledger.dcgm import DcgmSeries
from gpuledger.ledger.families import ACCOUNT, DEVICE, POD, HolderLabels
from gpuledger.ledger.series import SeriesGroup
from gpuledger.records import Account, GpuEvent
from gpuledger_sinks.remote_write.active_series import ActiveSeries, series_budget
from gpuledger_sinks.remote_write.namespace_budgets import (
    NamespaceBudgets,
    OverBudget,
    namespace_of,
)
from tests.unit.sinks.builders import (
    NODE,
    books,
    bus,
    entry,
    event,
    eventually,
    holder,
    pod,
    publish,
    reading,
    running,
)
from tests.unit.sinks.receiver import receiving
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.oracle import Series, parse_compressed
from tests.unit.sinks.remote_write.sending import is_committed, sink
from tests.unit.sinks.remote_write.test_active_series import encode, is_stale, parse_tick

BUSY = "gpuledger_pod_gpu_busy_ratio"
OF_A_POD = 4
"""Series of a pod with one container: its info, and three quantities of the books."""


def pods_event(
    tick: int, numbers: Sequence[int], *, namespace: str = "research", node: str = NODE
) -> GpuEvent:
    """Return a tick of pods with one container each."""
    uids = [f"uid-{number}" for number in numbers]
    return event(
        tick,
        node=node,
        entries=[entry(pod_uid=uid, container_id=None) for uid in uids],
        pods=[pod(uid=uid, name=uid, namespace=namespace) for uid in uids],
    )


def busy(series: Sequence[Series]) -> set[str | None]:
    return {one.label("pod") for one in series if one.name == BUSY and not is_stale(one)}


def active(rules: dict[str, int], budgets: NamespaceBudgets | None = None) -> ActiveSeries:
    return ActiveSeries(namespaces=budgets or NamespaceBudgets(rules))


def of_the_namespace(series: Sequence[Series], name: str = "research") -> int:
    return sum(one.label("namespace") == name and not is_stale(one) for one in series)


def test_what_begins_beyond_the_bound_is_left_out_and_what_has_begun_goes_on() -> None:
    series = active({"research": 2 * OF_A_POD})
    assert busy(encode(series, pods_event(0, [1, 2]))) == {"uid-1", "uid-2"}

    later = encode(series, pods_event(1, [3, 1, 2]))

    assert busy(later) == {"uid-1", "uid-2"}
    assert of_the_namespace(later) == 2 * OF_A_POD
    assert series.take_left_out() == {OverBudget("research", "default", "research"): OF_A_POD}
    assert series.take_left_out() == {}


@pytest.mark.parametrize("spare", range(OF_A_POD))
def test_a_pod_for_which_there_is_not_room_in_whole_is_left_out_in_whole(spare: int) -> None:
    series = active({"research": OF_A_POD + spare})

    sent = encode(series, pods_event(0, [1, 2, 3]))

    assert {one.label("pod_uid") for one in sent if one.label("namespace")} == {"uid-1"}
    assert series.take_left_out() == {OverBudget("research", "default", "research"): 2 * OF_A_POD}


def test_where_a_pod_ends_the_next_one_has_room() -> None:
    series = active({"*": OF_A_POD})
    encode(series, pods_event(0, [1]))
    assert busy(encode(series, pods_event(1, [1, 2]))) == {"uid-1"}

    assert busy(encode(series, pods_event(2, [2]))) == {"uid-2"}


def test_a_pod_whose_names_change_goes_on_though_its_namespace_has_no_room_to_spare() -> None:
    series = active({"*": OF_A_POD})
    encode(series, pods_event(0, [1]))
    one = pods_event(1, [1])
    renamed = msgspec.structs.replace(one.pods[0], name="train-0")

    sent = encode(series, msgspec.structs.replace(one, pods=[renamed, *one.pods[1:]]))

    assert busy(sent) == {"train-0"}


def test_other_namespaces_and_the_devices_have_all_their_series() -> None:
    without, bounded = active({}), active({"research": 0})
    one = pods_event(0, [1])
    whole, left = encode(without, one), encode(bounded, one)

    assert of_the_namespace(left) == 0
    assert {series.name for series in whole} - {series.name for series in left} == {
        BUSY,
        "gpuledger_pod_gpu_memory_bytes",
        "gpuledger_pod_gpu_power_watts",
    }
    assert of_the_namespace(encode(bounded, pods_event(1, [1], namespace="serving")), "serving")


def test_the_first_rule_that_matches_holds() -> None:
    budgets = NamespaceBudgets({"ci-*": 1, "ci-main": 100, "*": 10})

    room = {
        name: max(size for size in range(200) if not budgets.refusal_of(("default", name), size))
        for name in ("ci-main", "ci-7", "research")
    }

    assert room == {"ci-main": 1, "ci-7": 1, "research": 10}
    assert NamespaceBudgets({"ci-*": 1}).refusal_of(("default", "research"), 10**9) is None


def test_equal_names_of_two_clusters_have_a_budget_each() -> None:
    budgets = NamespaceBudgets({"*": 5})
    budgets.change({("east", "research"): 5})

    assert budgets.refusal_of(("east", "research"), 1) == "*"
    assert budgets.refusal_of(("west", "research"), 5) is None


def test_the_partitions_share_a_budget_and_give_back_what_they_let_go() -> None:
    budgets = NamespaceBudgets({"*": OF_A_POD})
    here, there = active({}, budgets), active({}, budgets)
    encode(here, pods_event(0, [1]))
    assert busy(encode(there, pods_event(0, [2], node="node-b"))) == set()

    here.clear()

    assert busy(encode(there, pods_event(1, [2], node="node-b"))) == {"uid-2"}


def test_a_node_that_falls_silent_gives_back_what_its_pods_had() -> None:
    series = active({"*": OF_A_POD})
    series.encode(samples_of(pods_event(0, [1])), now_ns=1)

    list(series.end_silent(before_ns=2))

    assert busy(encode(series, pods_event(0, [2], node="node-b"))) == {"uid-2"}


def test_nodes_that_are_forgotten_for_want_of_room_have_nothing_of_a_budget() -> None:
    budgets = NamespaceBudgets({"*": 400 * OF_A_POD})
    of_a_node = series_budget()
    ActiveSeries(budget=of_a_node).encode(samples_of(pods_event(0, [1], node="made-up-000")))
    bound = series_budget(20 * of_a_node.held_bytes)
    series = ActiveSeries(budget=bound, namespaces=budgets)
    for number in range(300):
        series.encode(samples_of(pods_event(0, [1], node=f"made-up-{number}")))

    assert series.forgotten > 100
    assert budgets.refusal_of(("default", "research"), 400 * OF_A_POD) == "*"
    assert budgets.refusal_of(("default", "research"), 350 * OF_A_POD) is None


def test_a_late_tick_has_what_is_alive_and_what_there_is_room_for() -> None:
    series = active({"*": OF_A_POD})
    encode(series, pods_event(5, [1]))

    past = parse_tick(series.encode(samples_of(pods_event(0, [1, 2]), is_past=True)))

    assert busy(past) == {"uid-1"}
    assert series.take_left_out() == {OverBudget("*", "default", "research"): OF_A_POD}


@given(
    st.lists(st.sets(st.integers(0, 5)), max_size=10),
    st.integers(0, 6 * OF_A_POD),
)
def test_there_are_never_more_than_the_rule_says(ticks: list[set[int]], bound: int) -> None:
    series = active({"*": bound})
    for tick, numbers in enumerate(ticks):
        one = pods_event(tick, sorted(numbers))
        assert of_the_namespace(encode(series, one)) <= bound


def test_what_is_idle_counts_for_who_holds_it() -> None:
    notebook = HolderLabels("research", "notebook-0", "uid", "jupyter")
    held = SeriesGroup(ACCOUNT, ("GPU-a", "idle", "", *notebook))
    nobodys = SeriesGroup(ACCOUNT, ("GPU-a", "idle", "", *HolderLabels()))
    jobs = SeriesGroup(ACCOUNT, ("GPU-a", "job", "7", *HolderLabels()))

    assert namespace_of("default", held) == ("default", "research")
    assert namespace_of("default", nobodys) is None
    assert namespace_of("default", jobs) is None
    assert namespace_of("default", SeriesGroup(DEVICE, ("GPU-a", "0", ""))) is None
    assert namespace_of("east", SeriesGroup(POD, ("GPU-a", "ml", "p", "u", "c"))) == ("east", "ml")


def test_a_device_under_others_names_counts_for_nobody_whoever_holds_it() -> None:
    held = event(entries=[entry(Account.IDLE, holder=0, held_ns=10**9)], held_by=[holder()])
    groups = DcgmSeries().values_of(held)

    assert {"research"} < {name for group in groups for name in group.label_values}
    assert {namespace_of("default", group) for group in groups} == {None}


def test_idle_of_a_namespace_without_room_is_left_out_with_its_holder() -> None:
    series = active({"research": 0})
    idle = entry(Account.IDLE, holder=0)

    sent = encode(series, event(entries=[idle], pods=[], held_by=[holder()]))

    assert {one.label("holder_pod") for one in sent} == {None}


async def test_what_is_left_out_is_counted_by_its_rule_and_logged_by_its_namespace() -> None:
    on, rules = bus(), {"research": 0, "unused": 7}
    await publish(on, pods_event(0, [1]))
    with capture_logs() as logs:
        async with (
            receiving() as receiver,
            running(sink(on, receiver, max_series_per_namespace=rules)),
        ):
            await eventually(is_committed(on, 1))

    assert busy(parse_compressed(receiver.received[0].body)) == set()
    counted = {
        rule: REGISTRY.get_sample_value("gpuledger_sink_samples_over_budget_total", {"rule": rule})
        for rule in rules
    }
    assert counted == {"research": OF_A_POD, "unused": 0}
    (told,) = [one for one in logs if one["event"] == "namespace_samples_dropped"]
    assert (told["cluster"], told["namespace"]) == ("default", "research")


def test_a_pod_that_has_begun_has_all_of_its_series_also_those_of_a_gpu_that_comes_later() -> None:
    series = active({"*": OF_A_POD})

    def on_gpus(tick: int, *uuids: str) -> list[Series]:
        gpus = [books(reading(uuid=uuid), entry()) for uuid in uuids]
        return encode(series, event(tick, gpus=gpus))

    on_gpus(0, "GPU-a")
    later = on_gpus(1, "GPU-a", "GPU-b")
    assert {one.label("gpu_uuid") for one in later if one.name == BUSY} == {"GPU-a", "GPU-b"}
    assert not series.take_left_out()

"""The use of a workload is the sum of its pods' use, and an error if any of it is unknown."""

import pytest
from msgspec.structs import replace

from gpuledger.codec import decoder_of
from gpuledger.records import Category, GpuEvent
from gpuledger_sinks.scaler.workload_use import (
    AbsentError,
    Metric,
    UnknownUseError,
    Workload,
    WorkloadUse,
)
from tests.default_topics import EVENTS
from tests.month import pod_records_of
from tests.truth_runs import DRIVERS, LEAD_SECONDS, Played, play_cell
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import record
from tests.unit.sinks.builders import SECOND_NS, START_NS, entry, event, holder, pod

TRAIN = Workload("research", "StatefulSet", "train")
GIB = 2**30
WINDOW_SECONDS = 60
CLAIMED_RATIO = 0.011
"""The documented maximum error of measured time, relative to the device."""


def window(
    *events: GpuEvent, seconds: float = 15.0, max_workloads: int = 100, now_ns: int = START_NS
) -> WorkloadUse:
    made = WorkloadUse(
        cluster="default",
        window_seconds=seconds,
        stale_after_seconds=60.0,
        max_workloads=max_workloads,
    )
    for one in events:
        made.take(one, now_ns)
    return made


def known(use: WorkloadUse, workload: Workload, metric: Metric, now_ns: int) -> float:
    """Return the use; 0 for a pod that started too late to be in a sample."""
    try:
        return use.total(workload, metric, now_ns)
    except AbsentError:
        return 0.0


def now(tick: int) -> int:
    return START_NS + tick * SECOND_NS


def events_of(played: Played) -> list[GpuEvent]:
    """Return a run's samples as the join attributes them; each pod is its own workload."""
    join = Given()
    for one in pod_records_of(played.simulation):
        join.read_pod(replace(one, owner_kind="Deployment", owner_name=one.uid), seen_time_ns=0)
    found = []
    for number, sample in enumerate(played.samples):
        join.now_ns = sample.time_ns
        messages = join.stage.take_samples([record(sample, offset=number)])
        found += [decoder_of(EVENTS.name, GpuEvent).decode(one.value) for one in messages]
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "kind",
    ["four pods", "two pods, bursts", "turnover beside a pod", "a pod an instance of MIG"],
)
def test_each_pod_on_a_shared_gpu_has_its_true_use(kind: str, seed: int) -> None:
    driver = DRIVERS["each window"]
    played = play_cell(kind, driver, sampling_interval_seconds=1.0, seed=seed)
    events, true = events_of(played), played.true()
    assert len(events) == len(true)
    first = round(LEAD_SECONDS)
    for last in (first + WINDOW_SECONDS, len(events)):
        end_ns = events[last - 1].time_ns
        use = window(*events[:last], seconds=WINDOW_SECONDS - 0.5, now_ns=end_ns)
        spans = range(last - WINDOW_SECONDS, last)
        length_ns = sum(events[at].interval_ns for at in spans)
        pods = {uid for at in spans for uid in true[at]}
        assert len(pods) > 1
        for uid in pods:
            (namespace,) = {one.spec.namespace for one in played.simulation.pods}
            workload = Workload(namespace, "Deployment", uid)
            gpus = sum(true[at][uid].busy_ns for at in spans if uid in true[at]) / length_ns
            held = sum(true[at][uid].byte_ns for at in spans if uid in true[at]) / length_ns
            assert known(use, workload, "gpus", end_ns) == pytest.approx(gpus, abs=CLAIMED_RATIO)
            assert known(use, workload, "memory", end_ns) == pytest.approx(held, abs=GIB / 10)


def test_the_use_of_all_pods_of_a_workload_is_added_up() -> None:
    other = entry(pod_uid="uid-other", container_id="d" * 64, memory_bytes=3 * GIB)
    shared = event(
        entries=[entry(), other, entry(Category.IDLE)],
        pods=[pod(), pod(uid="uid-other", name="train-1")],
    )
    use = window(shared, event(node="node-b"))

    assert use.total(TRAIN, "gpus", now(0)) == 1.5
    assert use.total(TRAIN, "memory", now(0)) == 5 * GIB


def test_a_pod_used_nothing_in_samples_without_it() -> None:
    use = window(*(event(tick) for tick in range(3)), event(3, entries=[], pods=[]), now_ns=now(3))

    assert use.total(TRAIN, "gpus", now(3)) == 3 / 8


def test_utilization_is_a_part_of_each_pods_allocation() -> None:
    """Two pods, each with a quarter of the GPU; one uses half of the GPU."""
    quarter = SECOND_NS // 4
    idle = [
        entry(Category.IDLE, allocation=place, allocated_ns=quarter, busy_ns=quarter)
        for place in range(2)
    ]
    busy = holder("chat-0", owner_kind="Deployment", owner_name="chat")
    calm = holder("chat-1", owner_kind="Deployment", owner_name="chat")
    used = entry(pod_uid="uid-chat-0", container_id="d" * 64)
    use = window(event(entries=[used, *idle], pods=[busy], allocated_to=[busy, calm]))

    chat = Workload("research", "Deployment", "chat")
    assert use.total(chat, "utilization", now(0)) == 2.0
    assert use.total(chat, "gpus", now(0)) == 0.5
    with pytest.raises(UnknownUseError, match="utilization of the pod with UID uid-train"):
        window(event()).total(TRAIN, "utilization", now(0))


def test_a_pod_that_runs_nothing_on_its_gpu_uses_nothing() -> None:
    idle = entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS)
    chat = holder("chat-0", owner_kind="Deployment", owner_name="chat")
    use = window(event(entries=[idle], pods=[], allocated_to=[chat]))

    for metric in ("gpus", "utilization", "memory"):
        assert use.total(Workload("research", "Deployment", "chat"), metric, now(0)) == 0


@pytest.mark.parametrize(("metric", "missing"), [("gpus", "busy_ns"), ("memory", "memory_bytes")])
def test_unknown_use_of_one_pod_is_an_error(metric: Metric, missing: str) -> None:
    unknown = replace(entry(pod_uid="uid-other", container_id="d" * 64), **{missing: None})
    pods = [pod(), pod(uid="uid-other", name="train-1")]
    use = window(event(entries=[entry(), unknown], pods=pods))

    with pytest.raises(UnknownUseError, match=f"{metric} of the pod with UID uid-other is unknown"):
        use.total(TRAIN, metric, now(0))


def test_samples_of_unknown_use_do_not_count() -> None:
    use = window(event(0), event(1, entries=[entry(busy_ns=None)]), now_ns=now(1))

    assert use.total(TRAIN, "gpus", now(1)) == 0.5


def test_a_workload_without_pods_is_an_error() -> None:
    use = window(event())

    with pytest.raises(AbsentError):
        use.total(TRAIN._replace(name="chat"), "gpus", now(0))
    with pytest.raises(AbsentError):
        use.total(TRAIN._replace(namespace="serving"), "gpus", now(0))


def test_a_unresponsive_node_with_pods_is_an_error_until_it_is_forgotten() -> None:
    use = window(event(node="node-b"))
    for tick in range(70):
        use.take(event(tick), now(tick))
        use.forget_stale(now(tick))
        if 15 <= tick < 60:
            with pytest.raises(UnknownUseError, match="node node-b"):
                use.total(TRAIN, "gpus", now(tick))
        else:
            assert use.total(TRAIN, "gpus", now(tick)) == (1.0 if tick < 15 else 0.5)


def test_a_node_whose_samples_come_late_is_an_error_and_not_forgotten() -> None:
    use = window(event(node="node-b"))
    for tick in range(100):
        use.take(event(tick), now(tick))
        use.take(event(tick - 20, node="node-b"), now(tick))
        use.forget_stale(now(tick))
        if tick >= 15:
            with pytest.raises(UnknownUseError, match="node node-b"):
                use.total(TRAIN, "gpus", now(tick))


def test_a_unresponsive_node_without_pods_of_the_workload_does_not_matter() -> None:
    use = window(event(node="node-b", entries=[], pods=[]))
    use.take(event(20), now(20))

    assert use.total(TRAIN, "gpus", now(20)) == 0.5


def test_repeated_samples_and_those_outside_the_window_do_not_count() -> None:
    busy = [entry(busy_ns=SECOND_NS)]
    use = window(
        event(0), event(0, entries=busy), event(-15, entries=busy), event(16, entries=busy)
    )
    other = window(event(0, cluster="other"))

    assert use.total(TRAIN, "gpus", now(0)) == 0.5
    with pytest.raises(AbsentError):
        other.total(TRAIN, "gpus", now(0))


def test_the_number_of_workloads_is_limited() -> None:
    use = window(event(), max_workloads=1)
    second = event(1, pods=[pod(owner_name="second")])

    assert use.take(second, now(1)) == 1
    assert use.total(TRAIN, "gpus", now(1)) == 0.25
    with pytest.raises(AbsentError):
        use.total(TRAIN._replace(name="second"), "gpus", now(1))
    use.take(event(20, entries=[], pods=[]), now(20))
    use.forget_stale(now(20))
    assert use.take(event(21, pods=[pod(owner_name="second")]), now(21)) == 0

"""The sums of a bill: allocated time by allocatee, as hours of physical GPUs, used or not."""

from pathlib import Path

import pytest

from gpuledger.records import DeviceAllocation, GpuEvent, GpuReading
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, pod, process, reading
from tests.unit.sinks.builders import START_NS
from tests.unit.sinks.store.storing import fill, query

H100 = "NVIDIA H100 80GB HBM3"
MINUTE_NS = 60 * SECOND_NS


def board(uuid: str, index: int, **changes: object) -> GpuReading:
    slices = {"compute_slices": 7, "memory_slices": 8, "model": H100}
    return reading(uuid=uuid, index=index, **slices | changes)


def instance(of: GpuReading, place: int, slices: int) -> GpuReading:
    return board(
        f"MIG-{of.index}-{place}",
        of.index,
        parent_uuid=of.uuid,
        gpu_instance=place,
        compute_instance=0,
        mig_profile=f"{slices}g.{slices * 10}gb",
        compute_slices=slices,
        memory_slices=slices,
        memory_total_bytes=slices * 10 * GIB,
        energy_millijoules=None,
    )


def cut(index: int, *slices: int) -> list[GpuReading]:
    of = board(f"GPU-{index}", index, mig_enabled=True)
    return [of, *(instance(of, place, each) for place, each in enumerate(slices, start=1))]


def replicas(*pods: str, of: int) -> list[DeviceAllocation]:
    return [
        DeviceAllocation(
            gpu_uuid="GPU-0",
            device_id=f"GPU-0::{place}",
            resource_name="nvidia.com/gpu.shared",
            namespace="research",
            pod=name,
            container="main",
            replica=str(place),
            device_replicas=of,
        )
        for place, name in enumerate(pods)
    ]


def take(given: Given, tick: int = 0, **changes: object) -> GpuEvent:
    """Return the event of this second as the join books it."""
    return given.take(seq=1000 * (tick + 1), time_ns=START_NS + tick * SECOND_NS, **changes)


@pytest.mark.parametrize(
    ("boards", "instances"),
    [
        ([cut(0, 1), cut(1, 3), cut(2, 2)], "a lone instance on each"),
        ([cut(0, 3, 4), cut(1, 3, 3), cut(2, 1)], "cut to the last slice, or not"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_hours_of_partitioned_gpus_add_up_to_the_number_of_physical_gpus(
    boards: list[list[GpuReading]], instances: str, tmp_path: Path
) -> None:
    rows = [row for rows in boards for row in rows]
    fill(tmp_path, [take(Given(), gpus=rows, interval_ns=MINUTE_NS)])

    allocated = (
        "sum(allocated_gpu_hours) * 60, sum(allocated_seconds) / 60, max(gpu_compute_slices)"
    )
    sql = f"select model, {allocated} from {{entries}} where category = 'idle' group by all"  # noqa: S608  # our own
    ((model, gpu_hours, rows_hours, slices),) = query(tmp_path, sql)
    assert gpu_hours == pytest.approx(3.0), instances
    # Each row is a device; if each counted as a whole GPU, there would be too many hours.
    assert (model, float(rows_hours), slices) == (H100, len(rows), 7)


def test_hours_without_slices_are_whole_for_a_gpu_and_unknown_for_an_instance(
    tmp_path: Path,
) -> None:
    unsaid = {"compute_slices": None, "memory_slices": None}
    whole = board("GPU-9", 9, **unsaid)
    of = board("GPU-0", 0, mig_enabled=True, **unsaid)
    part = instance(of, 1, 1)
    fill(tmp_path, [take(Given(), gpus=[whole, of, part], interval_ns=MINUTE_NS)])

    sql = (
        "select gpu_uuid, allocated_gpu_hours * 60 from {entries} where category = 'idle'"
        " order by 1"
    )
    assert query(tmp_path, sql) == [
        ("GPU-0", pytest.approx(1.0)),
        ("GPU-9", pytest.approx(1.0)),
        ("MIG-0-1", None),
    ]


def test_allocated_hours_do_not_depend_on_usage(tmp_path: Path) -> None:
    allocated = replicas("train-0", "train-1", of=3)
    found = []
    for use, processes in ((0.0, []), (1.0, [process(container=0, sm_utilization_ratio=1.0)])):
        of_use = tmp_path / str(use)
        given = Given()
        given.read_pod(pod(0))
        given.read_pod(pod(1))
        row = board("GPU-0", 0, utilization_ratio=use)
        fill(of_use, [take(given, gpus=[row], processes=processes, allocations=allocated)])
        found.append(allocated_to(of_use))

    assert found[0] == found[1]
    assert found[0] == [("train-0", 333_333_334), ("train-1", 333_333_333), (None, 333_333_333)]


def allocated_to(store: Path) -> list[tuple[str | None, int]]:
    sql = (
        "select allocated_pod, sum(allocated_ns) from {entries} where category = 'idle'"
        " group by all order by allocated_pod nulls last"
    )
    return [(name, int(allocated_ns)) for name, allocated_ns in query(store, sql)]


def test_a_gpu_that_is_lost_for_a_while_has_gap_rows_and_stays_allocated(tmp_path: Path) -> None:
    given = Given()
    given.read_pod(pod(0))
    allocated = replicas("train-0", of=2)
    lost = GpuReading(uuid="GPU-0", index=0, model=H100, compute_slices=7, unresponsive=True)
    events = [
        take(
            given, tick, gpus=[lost if 3 <= tick < 36 else board("GPU-0", 0)], allocations=allocated
        )
        for tick in range(40)
    ]
    fill(tmp_path, events)

    assert allocated_to(tmp_path) == [("train-0", 20 * SECOND_NS), (None, 20 * SECOND_NS)]
    gaps = (
        "select gpu_uuid, sum(gap) from"
        " (select distinct node, boot_id, seq, gpu_uuid, gpu_gap_seconds as gap from {entries})"
        " where gap is not null group by all"
    )
    assert query(tmp_path, gaps) == [("GPU-0", 33)]
    lost_rows = (
        "select distinct allocated_pod, busy_ns, memory_bytes, energy_millijoules, model"
        " from {entries} where gpu_gap_ns is not null order by 1"
    )
    assert query(tmp_path, lost_rows) == [
        ("train-0", None, None, None, H100),
        (None, None, None, None, H100),
    ]

"""UID and labels of a series' pod: only if they are certain, never guessed."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gpuledger.records import AllocationSource, ContainerRef, DeviceAllocation, GpuProcess
from gpuledger_agent.exposition.dcgm_fields import all_fields
from gpuledger_agent.settings import ExpositionSettings
from tests.unit.agent.exposition.builders import (
    GIB,
    Reported,
    Row,
    allocation,
    gpu,
    instance,
    inventory,
    node,
    process,
    sample,
)

HELD = "gpuledger_node_gpu_allocation_info"
BUSY = "gpuledger_container_gpu_busy_ratio"
OLD, NEW = "uid-old", "uid-new"
TEAM = [("label_team", "vision")]
ALL = ExpositionSettings(process_series=True, pod_series=True)


def tick(
    *rows: Row,
    containers: Mapping[str, str | None] | None = None,
    processes: Sequence[GpuProcess] = (),
    allocations: Sequence[DeviceAllocation] = (),
) -> Reported:
    """Return a tick whose containers have these pod UIDs from their cgroups, by container id."""
    made = sample(*rows, processes=processes, allocations=allocations)
    refs = [ContainerRef(container_id=one, pod_uid=uid) for one, uid in (containers or {}).items()]
    made.sample.containers.extend(refs)
    return made


@pytest.mark.parametrize(
    ("folders", "running", "uid"),
    [
        ([NEW], None, NEW),
        ([OLD, NEW], NEW, NEW),
        ([OLD, NEW], OLD, OLD),
        ([], NEW, NEW),
        ([OLD, NEW], None, ""),
        ([NEW], OLD, ""),
        ([], None, ""),
    ],
    ids=[
        "one directory",
        "two directories and a process of the new one",
        "two directories and a process of the old one",
        "no directory and a process",
        "two directories",
        "a process that outlived its pod",
        "nothing",
    ],
)
def test_an_allocation_has_the_pod_uid_if_it_is_certain(
    folders: list[str], running: str | None, uid: str
) -> None:
    it = node(ExpositionSettings(dcgm_pod_uid=True), uids={"ml/a-0": folders}, c1="ml/a-0/main")
    it.show(
        tick(
            gpu(0, temperature_celsius=40),
            containers={"c1": running} if running else {},
            processes=[process(0, 0)] if running else [],
            allocations=[allocation(0, "ml/a-0/main")],
        )
    )
    assert it.values(HELD, "pod", "pod_uid") == {("a-0", uid): 1}
    assert it.values("DCGM_FI_DEV_GPU_TEMP", "pod", "pod_uid") == {("a-0", uid): 40}


def test_shares_of_a_gpu_may_belong_to_different_pods_of_the_same_name() -> None:
    it = node(uids={"ml/a-0": [OLD, NEW]}, c1="ml/a-0/main")
    shares = [allocation(0, "ml/a-0/main", replica=one) for one in "01"]
    it.show(
        tick(gpu(0), containers={"c1": OLD}, processes=[process(0, 0)], allocations=shares),
    )
    assert it.values(HELD, "replica", "pod_uid") == {("0", ""): 1, ("1", ""): 1}
    assert it.values(BUSY, "pod_uid") == {(OLD,): 0.25}


def test_an_allocation_shows_the_share_that_an_annotation_states() -> None:
    it = node(uids={"ml/a-0": [OLD, NEW]}, c1="ml/a-0/main")
    stated = allocation(0, "ml/a-0/main", source=AllocationSource.HAMI, share_ppm=250_000)
    it.show(tick(gpu(0), containers={"c1": OLD}, processes=[process(0, 0)], allocations=[stated]))
    # As with replicas, the process may belong to another pod of the same name.
    assert it.values(HELD, "source", "share_ppm", "pod_uid") == {("hami", "250000", ""): 1}


def test_a_process_on_another_device_does_not_identify_the_pod_of_this_one() -> None:
    it = node(uids={"ml/a-0": [OLD, NEW]}, c1="ml/a-0/main")
    it.show(
        tick(
            gpu(0, mig_enabled=True),
            instance(1),
            instance(2),
            containers={"c1": OLD},
            processes=[process(1, 0)],
            allocations=[allocation(0, "ml/a-0/main", gpu_instance=one) for one in (1, 2)],
        )
    )
    assert it.values("DCGM_FI_DEV_FB_USED", "GPU_I_ID", "pod_uid") == {}
    assert sorted(uid for (uid,) in it.values(HELD, "pod_uid")) == ["", OLD]


def test_a_container_without_a_pod_in_its_cgroup_has_the_uid_of_its_name() -> None:
    it = node(uids={"ml/a": [NEW], "ml/b": [OLD, NEW]}, c1="ml/a/main", c2="ml/b/main")
    it.show(
        tick(gpu(0), containers={"c1": None, "c2": None}, processes=[process(0, 0), process(0, 1)])
    )
    assert it.values(BUSY, "pod", "pod_uid") == {("a", NEW): 0.25, ("b", ""): 0.25}


def test_dcgms_names_have_the_uid_only_on_request() -> None:
    it = node(uids={"ml/a": [NEW]})
    it.show(tick(gpu(0, temperature_celsius=40), allocations=[allocation(0, "ml/a/main")]))
    assert it.values("DCGM_FI_DEV_GPU_TEMP", "pod", "pod_uid") == {("a", ""): 40}
    assert it.values(HELD, "pod_uid") == {(NEW,): 1}


def test_all_series_of_a_pod_have_its_chosen_labels_and_no_others_do() -> None:
    it = node(ALL, uids={"ml/a": [NEW]}, pod_labels={NEW: TEAM}, c1="ml/a/main", c2="ml/b/main")
    used = {"memory_used_bytes": 2 * GIB, "utilization_ratio": 0.5}
    it.show(
        tick(
            gpu(0, **used),
            gpu(1, **used),
            containers={"c1": NEW, "c2": OLD},
            processes=[process(0, 0), process(1, 0), process(1, 1, pid=7)],
            allocations=[allocation(0, "ml/a/main")],
        )
    )
    text = it.page().decode()
    of_a = [line for line in text.splitlines() if 'pod="a"' in line or 'pod_name="a"' in line]
    assert {line.partition("{")[0] for line in of_a} >= {
        HELD,
        BUSY,
        "DCGM_FI_DEV_FB_USED",
        "gpuledger_container_gpu_memory_bytes",
        "gpuledger_process_gpu_memory_bytes",
        "nvidia_pid_pod",
    }
    assert [line for line in of_a if 'label_team="vision"' not in line] == []
    others = [line for line in text.splitlines() if line not in of_a]
    assert [line for line in others if "label_team" in line] == []


def test_dcgm_exporters_pod_labels_are_only_on_dcgms_series() -> None:
    it = node(uids={"ml/a": [NEW]}, dcgm_pod_labels={NEW: [("team", "vision")]})
    it.show(tick(gpu(0, temperature_celsius=40), allocations=[allocation(0, "ml/a/main")]))
    lines = [line for line in it.page().decode().splitlines() if 'team="vision"' in line]
    assert lines
    assert all(line.startswith("DCGM_") for line in lines)
    assert it.values("DCGM_FI_DEV_GPU_TEMP", "pod", "team") == {("a", "vision"): 40}


@pytest.mark.parametrize("is_old", [False, True])
def test_no_label_of_a_pod_repeats_the_name_of_another_label(
    tmp_path: Path, *, is_old: bool
) -> None:
    file = tmp_path / "counters.csv"
    every = [f"{one.old},{one.kind},x" for one in all_fields()]
    file.write_text("\n".join(every))
    settings = ExpositionSettings(
        counters_file=file, dcgm_pod_uid=True, dcgm_old_labels=is_old, pod_series=True
    )
    rows = (
        gpu(0, temperature_celsius=40, memory_used_bytes=GIB),
        instance(7, of=0, memory_used_bytes=GIB),
        instance(7, of=0, ci=1, memory_used_bytes=GIB),
    )
    shown = tick(
        *rows,
        containers={"c1": NEW},
        processes=[process(0, 0)],
        allocations=[allocation(0, "ml/a/main")],
    )
    plain = node(settings, uids={"ml/a": [NEW]}, c1="ml/a/main")
    plain.show(shown, inventory=inventory(0))
    names = set(re.findall(r'[{,](\w+)="', plain.page().decode()))
    assert {"gpu", "pod_uid", "DCGM_FI_DRIVER_VERSION", "GPU_I_ID"} <= names
    labels = {NEW: [(name, "stolen") for name in sorted(names)]}
    it = node(settings, uids={"ml/a": [NEW]}, dcgm_pod_labels=labels, c1="ml/a/main")
    it.show(shown, inventory=inventory(0))
    for line in it.page().decode().splitlines():
        found = re.findall(r'[{,](\w+)="', line)
        assert len(found) == len(set(found)), line


def test_a_pod_that_may_be_one_of_two_has_no_labels() -> None:
    it = node(uids={"ml/a-0": [OLD, NEW]}, pod_labels={OLD: TEAM, NEW: TEAM})
    it.show(tick(gpu(0), allocations=[allocation(0, "ml/a-0/main")]))
    assert it.values(HELD, "pod", "label_team") == {("a-0", ""): 1}

"""MIG instances: found in each tick, queried by that tick's handles, with their own processes."""
# ruff: noqa: ANN401  # the structs of nvidia-ml-py have no types

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuledger.records import MigInstance
from gpuledger_agent.core.raw import CallGroup, ClockReading, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_simulator.clock import ManualClock
from tests.fakes.nvml import Altered
from tests.unit.simulator.mig_builders import EPOCH_NS, GIB, cut_simulation

COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
LISTS = (
    COMPUTE,
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"


class Bench:
    """A GPU that is partitioned into four instances, and after 20 s into one."""

    def __init__(self, **driver: object) -> None:
        self.clock = ManualClock(start_ns=EPOCH_NS)
        self.truth = cut_simulation(self.clock, **driver).node("node-a")
        self.library = Altered(self.truth.nvml)
        self.gpu: NvidiaGpu = NvmlSession(self.library).open()[0]
        self.clock.advance(1)

    def answer(self) -> RawGpuSample:
        """Query the values that are booked."""
        books = self.gpu.query(CallGroup.USAGE, SampleCursor())
        return RawGpuSample(uuid=self.gpu.uuid, index=0, **books)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def places(answer: RawGpuSample) -> list[list[int]]:
    return [[process.pid for process in one.processes or ()] for one in answer.instances]


def test_each_instance_is_named_by_its_ids_and_profile(bench: Bench) -> None:
    answer = bench.answer()
    assert answer.mig_enabled
    assert bench.gpu.uuid == answer.uuid
    named = [
        (one.gpu_instance, one.compute_instance, one.profile, one.gpu_slices, one.compute_slices)
        for instance in answer.instances
        if (one := instance.instance)
    ]
    assert named == [
        (1, 0, "1g.10gb", 1, 1),
        (2, 0, "3g.40gb", 3, 3),
        (3, 0, "1c.2g.20gb", 2, 1),
        (3, 1, "1c.2g.20gb", 2, 1),
    ]
    assert {one.instance and one.instance.parent_uuid for one in answer.instances} == {answer.uuid}
    assert len({one.uuid for one in answer.instances}) == 4
    assert all(one.uuid.startswith("MIG-") for one in answer.instances)


def test_each_instance_has_its_slices_and_the_gpu_has_all(bench: Bench) -> None:
    """Compute instances of one GPU instance share its memory slices."""
    answer = bench.answer()
    assert (answer.compute_slices, answer.memory_slices) == (7, 8)
    assert [(one.compute_slices, one.memory_slices) for one in answer.instances] == [
        (1, 1),
        (3, 4),
        (1, 2),
        (1, 2),
    ]


class ProfileInfo(SimpleNamespace):
    """A driver's description of a profile."""


# Compute slices and MiB by profile, as `nvidia-smi mig -lgip` lists them (the GiB of its table).
BOARDS: dict[str, tuple[dict[int, tuple[int, int]], tuple[int, int]]] = {
    "A30": ({0: (1, 5952), 1: (2, 11968), 3: (4, 24125)}, (4, 4)),
    "A100 40GB": (
        {0: (1, 4864), 1: (2, 9856), 2: (3, 19968), 3: (4, 19968), 4: (7, 40192)},
        (7, 8),
    ),
    "H200": (
        {0: (1, 16384), 1: (2, 33280), 2: (3, 71168), 3: (4, 71168), 4: (7, 143360)},
        (7, 8),
    ),
}


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("names_placements", [True, False])
def test_the_slices_of_a_gpu_follow_from_its_profiles(
    bench: Bench, board: str, *, names_placements: bool
) -> None:
    profiles, expected = BOARDS[board]

    def info(_: Any, profile: int, version: int) -> ProfileInfo:
        if profile not in profiles or version != 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        slices, mebibytes = profiles[profile]
        return ProfileInfo(sliceCount=slices, memorySizeMB=mebibytes)

    bench.library.functions["nvmlDeviceGetGpuInstanceProfileInfo"] = info
    if not names_placements:
        bench.library.refuse("nvmlGpuInstanceGetInfo", pynvml.NVML_ERROR_NO_PERMISSION)
    answer = bench.answer()
    assert (answer.compute_slices, answer.memory_slices) == expected


def test_without_placements_memory_slices_follow_from_the_size(bench: Bench) -> None:
    bench.library.refuse("nvmlGpuInstanceGetInfo", pynvml.NVML_ERROR_NO_PERMISSION)
    assert [one.memory_slices for one in bench.answer().instances] == [1, 4, 2, 2]


def test_without_profiles_the_slices_of_the_gpu_are_absent(
    bench: Bench,
) -> None:
    bench.library.refuse("nvmlDeviceGetGpuInstanceProfileInfo", pynvml.NVML_ERROR_NO_PERMISSION)
    answer = bench.answer()
    assert (answer.compute_slices, answer.memory_slices) == (None, None)
    assert [one.compute_slices for one in answer.instances] == [1, 3, 1, 1]


def test_a_gpu_without_mig_is_one_slice_of_one(bench: Bench) -> None:
    bench.library.refuse("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_NOT_SUPPORTED)
    answer = bench.answer()
    assert (answer.compute_slices, answer.memory_slices) == (1, 1)


def test_after_a_failed_call_the_slices_are_read_in_the_next_tick(bench: Bench) -> None:
    bench.library.refuse("nvmlDeviceGetGpuInstanceProfileInfo", pynvml.NVML_ERROR_TIMEOUT)
    assert bench.answer().compute_slices is None
    bench.library.functions.clear()
    assert bench.answer().compute_slices == 7


def test_each_instance_has_its_own_memory_and_processes(bench: Bench) -> None:
    answer = bench.answer()
    assert [(one.memory_used_bytes or 0) // GIB for one in answer.instances] == [5, 30, 6, 6]
    pids = [process.pid for process in bench.truth.gpus[0].processes]
    assert places(answer) == [[pids[0]], [pids[1]], [pids[2]], []]
    assert answer.processes == ()


def without_ids(bench: Bench) -> None:
    own = bench.truth.nvml.nvmlDeviceGetComputeRunningProcesses_v3

    def forget(handle: Any) -> list[Any]:
        no = {"gpuInstanceId": 0xFFFFFFFF, "computeInstanceId": 0xFFFFFFFF}
        return [SimpleNamespace(**(vars(one) | no)) for one in own(handle)]

    bench.library.functions[COMPUTE] = forget


def without_compute_instances(bench: Bench) -> None:
    """Hide the compute instances: the two on the third GPU instance then differ by their lists."""
    own = bench.truth.nvml.nvmlDeviceGetComputeRunningProcesses_v3
    bench.library.functions[COMPUTE] = lambda handle: [
        SimpleNamespace(**(vars(one) | {"computeInstanceId": 0xFFFFFFFF})) for one in own(handle)
    ]


def without_the_parents(code: int) -> Callable[[Bench], None]:
    def alter(bench: Bench) -> None:
        for name in LISTS:
            own = getattr(bench.truth.nvml, name)

            def refuse(handle: Any, own: Callable[..., Any] = own) -> Any:
                if handle == bench.gpu.handle:
                    raise pynvml.NVMLError(code)
                return own(handle)

            bench.library.functions[name] = refuse

    return alter


def empty_for_the_parent(bench: Bench) -> None:
    own = bench.truth.nvml.nvmlDeviceGetComputeRunningProcesses_v3
    bench.library.functions[COMPUTE] = lambda handle: (
        [] if handle == bench.gpu.handle else own(handle)
    )


def without_the_instances(bench: Bench) -> None:
    for name in LISTS:
        own = getattr(bench.truth.nvml, name)

        def refuse(handle: Any, own: Callable[..., Any] = own) -> Any:
            if handle != bench.gpu.handle:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return own(handle)

        bench.library.functions[name] = refuse


@pytest.mark.parametrize(
    "alter",
    [
        without_ids,
        without_compute_instances,
        without_the_parents(pynvml.NVML_ERROR_NO_PERMISSION),
        without_the_parents(pynvml.NVML_ERROR_TIMEOUT),
        empty_for_the_parent,
        without_the_instances,
    ],
)
def test_processes_are_placed_in_instances_whichever_lists_the_driver_provides(
    bench: Bench, alter: Callable[[Bench], None]
) -> None:
    expected = places(bench.answer())
    fresh = Bench()
    alter(fresh)
    for _ in range(2):
        answer = fresh.answer()
        assert places(answer) == expected
        assert not answer.processes


def test_a_complete_list_of_the_parent_replaces_those_of_the_instances(bench: Bench) -> None:
    bench.answer()
    assert {name: bench.library.calls[name] for name in LISTS} == dict.fromkeys(LISTS, 1)
    bench.clock.advance(18.7)
    assert places(bench.answer()) == [[], [], [], []]
    assert bench.library.calls[COMPUTE] == 2


def test_the_id_of_a_gpu_instance_is_enough_if_it_has_one_compute_instance(bench: Bench) -> None:
    without_compute_instances(bench)
    bench.clock.advance(1)
    bench.truth.gpus[0].processes.pop()
    assert [len(found) for found in places(bench.answer())] == [1, 1, 0, 0]
    assert bench.library.calls[COMPUTE] == 1


def test_a_process_in_no_instance_stays_on_the_gpu(bench: Bench) -> None:
    own = bench.truth.nvml.nvmlDeviceGetComputeRunningProcesses_v3
    stray = SimpleNamespace(pid=99, usedGpuMemory=1, gpuInstanceId=9, computeInstanceId=0)
    bench.library.functions[COMPUTE] = lambda handle: [
        *own(handle),
        *([stray] if handle == bench.gpu.handle else []),
    ]
    answer = bench.answer()
    assert [process.pid for process in answer.processes or ()] == [99]
    assert [len(found) for found in places(answer)] == [1, 1, 1, 0]


def test_if_all_lists_failed_the_processes_are_unknown(bench: Bench) -> None:
    for name in LISTS:
        bench.library.refuse(name, pynvml.NVML_ERROR_TIMEOUT)
    answer = bench.answer()
    assert {one.processes for one in answer.instances} == {None}


def test_a_repartitioning_is_noticed_at_the_next_query(bench: Bench) -> None:
    before = bench.answer()
    bench.clock.advance(19)
    after = bench.answer()
    assert [one.instance and one.instance.profile for one in after.instances] == ["7g.80gb"]
    assert not {one.uuid for one in before.instances} & {one.uuid for one in after.instances}
    assert after.instances[0].memory_total_bytes


def test_an_instance_whose_handle_fails_now_is_still_listed(bench: Bench) -> None:
    expected = [one.uuid for one in bench.answer().instances]
    bench.library.refuse(HANDLE, pynvml.NVML_ERROR_TIMEOUT)
    assert [one.uuid for one in bench.answer().instances] == expected


def test_a_gpu_with_mig_has_no_utilization_even_if_the_driver_reports_one(bench: Bench) -> None:
    bench.library.functions["nvmlDeviceGetUtilizationRates"] = lambda _: SimpleNamespace(
        gpu=70, memory=9
    )
    answer = bench.answer()
    assert (answer.percent, answer.samples, answer.process_samples) == (None, None, None)


def test_readings_refused_under_mig_are_queried_again_without_it(bench: Bench) -> None:
    assert bench.answer().samples is None
    bench.truth.gpus[0].facts.cuts.clear()
    bench.answer()
    answer = bench.answer()
    assert answer.mig_enabled is False
    assert answer.instances == ()
    assert answer.samples


def test_readings_refused_to_a_fast_poll_during_a_repartitioning_are_queried_again(
    bench: Bench,
) -> None:
    """A fast poll may fall between the change of the mode and the tick that notices it."""
    cuts, at = bench.truth.gpus[0].facts.cuts, ClockReading.read(bench.clock)
    before = [*cuts]
    cuts.clear()
    bench.answer()
    cuts.extend(before)
    assert bench.gpu.fast_poll(SampleCursor(), at=at).samples is None
    bench.answer()
    cuts.clear()
    bench.answer()
    assert bench.gpu.fast_poll(SampleCursor(), at=at).samples


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND]
)
def test_a_gpu_without_mig_reports_neither_mode_nor_instances(bench: Bench, code: int) -> None:
    bench.library.refuse("nvmlDeviceGetMigMode", code)
    answer = bench.answer()
    assert (answer.mig_enabled, answer.instances) == (None, ())


def test_a_mode_that_fails_now_keeps_its_last_value(bench: Bench) -> None:
    bench.answer()
    bench.library.refuse("nvmlDeviceGetMigMode", pynvml.NVML_ERROR_TIMEOUT)
    assert len(bench.answer().instances) == 4


def test_a_profile_missing_from_the_name_is_built_from_the_slices(bench: Bench) -> None:
    bench.library.functions["nvmlDeviceGetName"] = lambda _: "Some GPU"
    profiles = [one.instance and one.instance.profile for one in bench.answer().instances]
    assert profiles == ["1g.10gb", "3g.40gb", "1c.2g.20gb", "1c.2g.20gb"]


def test_an_implausible_value_of_an_instance_is_absent(bench: Bench) -> None:
    garbage = SimpleNamespace(
        gpuInstanceSliceCount=2**32 - 1,
        computeInstanceSliceCount=2**31,
        multiprocessorCount=2**32 - 2,
        memorySizeMB=2**64 - 1,
    )
    bench.library.functions["nvmlDeviceGetAttributes_v2"] = lambda _: garbage
    bench.library.functions["nvmlDeviceGetComputeInstanceId"] = lambda _: 2**32 - 1
    one = bench.answer().instances[0].instance
    assert one
    assert (one.compute_instance, one.gpu_slices, one.compute_slices) == (None, None, None)
    assert (one.multiprocessors, one.memory_bytes) == (None, None)


def test_a_new_layout_is_reported_once_with_the_booked_values(bench: Bench) -> None:
    """Not with the next health, because the kubelet's ids are resolved to instances by it."""
    bench.answer()
    assert bench.gpu.query(CallGroup.HEALTH, SampleCursor())["facts"].mig_enabled
    assert bench.answer().facts is None
    bench.clock.advance(19)
    facts = bench.answer().facts
    assert facts
    assert [one.profile for one in facts.instances] == ["7g.80gb"]
    assert bench.answer().facts is None


def test_the_layout_is_reported_as_facts(bench: Bench) -> None:
    bench.answer()
    facts = bench.gpu.query(CallGroup.HEALTH, SampleCursor())["facts"]
    first = facts.instances[0]
    assert isinstance(first, MigInstance)
    assert (first.gpu_instance, first.profile, first.multiprocessors) == (1, "1g.10gb", 16)
    assert len(facts.instances) == 4


@pytest.mark.parametrize(
    "refused", ["nvmlDeviceGetGpuInstanceById", "nvmlGpuInstanceGetInfo", None]
)
def test_the_placement_of_an_instance_is_read_once_if_permitted(
    bench: Bench, refused: str | None
) -> None:
    if refused:
        bench.library.refuse(refused, pynvml.NVML_ERROR_NO_PERMISSION)
    bench.answer()
    bench.answer()
    facts = bench.gpu.query(CallGroup.HEALTH, SampleCursor())["facts"]
    starts = [one.placement_start for one in facts.instances]

    assert starts == ([None] * 4 if refused else [0, 1, 5, 5])
    assert bench.library.calls["nvmlDeviceGetGpuInstanceById"] <= 4


def test_without_permission_to_monitor_mig_the_row_of_the_gpu_remains_and_is_marked() -> None:
    bench = Bench(mig_monitor=False)
    for _ in range(2):
        answer = bench.answer()
        assert (answer.mig_enabled, answer.mig_hidden) == (True, True)
        assert (answer.instances, answer.processes) == ((), None)
        assert answer.memory_total_bytes is None
        assert not answer.memory_unified
        assert answer.power_milliwatts
        assert answer.energy_millijoules
    # A refused call is made once, and is in the inventory with its reason.
    assert bench.library.calls[HANDLE] == 1
    facts = bench.gpu.query(CallGroup.HEALTH, SampleCursor())["facts"]
    reasons = {one.call: one.reason for one in facts.capabilities}
    assert reasons[HANDLE] == reasons[COMPUTE] == "NoPermission"


@pytest.mark.parametrize("hidden", ["nvmlDeviceGetUUID", COMPUTE, "nvmlDeviceGetMemoryInfo"])
def test_instances_with_a_permission_error_are_hidden(bench: Bench, hidden: str) -> None:
    assert not bench.answer().mig_hidden
    fresh = Bench()
    own = getattr(fresh.truth.nvml, hidden)

    def refuse(handle: Any, *arguments: Any) -> Any:
        if handle != fresh.gpu.handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        # Without the parent's list each instance is queried for its own.
        return [] if hidden == COMPUTE else own(handle, *arguments)

    fresh.library.functions[hidden] = refuse
    assert fresh.answer().mig_hidden
    assert fresh.answer().mig_hidden


def test_refused_placements_do_not_hide_instances(bench: Bench) -> None:
    bench.library.refuse("nvmlDeviceGetGpuInstanceById", pynvml.NVML_ERROR_NO_PERMISSION)
    assert len(bench.answer().instances) == 4
    assert not bench.answer().mig_hidden

"""The driver's process lists: the agent reads them whatever the sizes of rows and lists."""
# ruff: noqa: ANN401  # ctypes has no types

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from struct import pack
from threading import Thread
from typing import Any

import pynvml
import pytest

from gpuledger_agent.core.raw import ListedProcess
from gpuledger_agent.gpu.nvidia.core import list_processes
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.gpu.nvidia.system_library import SystemNvml, with_own_lists
from gpuledger_agent.metrics import NVML_ERRORS
from gpuledger_agent.recording.format import RecordingHeader
from gpuledger_agent.recording.recorder import Recorder, RecordingLibrary
from gpuledger_agent.recording.replay import open_recording
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.fakes.nvml_pointers import CLibrary, referent_of
from tests.metric_values import value_of

EPOCH_NS = 1_790_000_000_000_000_000
MIB = 1 << 20
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
OTHERS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
)
OK: int = pynvml.NVML_SUCCESS
GREW: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
NO_ID, NO_BYTES = 2**32 - 1, 2**64 - 1


class CList:
    """A list in the driver's library: `rows` of pid, bytes and two ids, written as C does."""

    def __init__(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        self.rows = rows
        self.rooms: list[int] = []
        """The number of rows that there was room for, per call."""
        self.while_called: Callable[[], None] = lambda: None

    def __call__(self, _: Any, count: Any, buffer: Any) -> int:
        size = referent_of(count)
        self.rooms.append(size.value if buffer is not None else 0)
        room, size.value = self.rooms[-1], len(self.rows)
        if room < len(self.rows):
            return GREW
        written = b"".join(pack("@IQII", *row) for row in self.rows)
        ctypes.memmove(buffer, written, len(written))
        self.while_called()
        return OK


def processes(*pids: int) -> list[tuple[int, int, int, int]]:
    return [(pid, pid * MIB, NO_ID, NO_ID) for pid in pids]


def listed(monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Any]) -> DeviceClient:
    CLibrary(monkeypatch, functions)
    return DeviceClient(library=with_own_lists(pynvml), handle=pynvml.c_nvmlDevice_t())


def pids_of(found: Sequence[ListedProcess] | None) -> list[int] | None:
    return None if found is None else [process.pid for process in found]


def test_one_call_reads_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = {name: CList([]) for name in (COMPUTE, *OTHERS)}
    lists[COMPUTE].rows = [(7, 5 * MIB, 1, 2), (8, NO_BYTES, NO_ID, NO_ID)]
    found = list_processes(listed(monkeypatch, lists))
    assert found
    rows = [(p.pid, p.memory_bytes, p.gpu_instance, p.compute_instance) for p in found]
    assert rows == [(7, 5 * MIB, 1, 2), (8, None, None, None)]
    assert [len(one.rooms) for one in lists.values()] == [1, 1, 1]


def test_a_list_longer_than_the_buffer_is_read_in_one_call_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = CList(processes(*range(1, 1001)))
    client = listed(monkeypatch, {COMPUTE: compute})
    for _ in range(3):
        assert pids_of(list_processes(client)) == list(range(1, 1001))
    first, *others = compute.rooms
    assert first < 1000 <= min(others)
    assert len(compute.rooms) == 4


@pytest.mark.parametrize(
    ("code", "count"),
    [
        pytest.param(GREW, 1_000_000, id="more than can run"),
        pytest.param(OK, 4_000_000_000, id="more than there is room for"),
        pytest.param(pynvml.NVML_ERROR_TIMEOUT, 0, id="failed"),
    ],
)
def test_a_list_that_cannot_be_read_is_none(
    monkeypatch: pytest.MonkeyPatch, code: int, count: int
) -> None:
    def fail(_: Any, size: Any, __: Any) -> int:
        referent_of(size).value = count
        return code

    assert list_processes(listed(monkeypatch, {COMPUTE: fail})) is None


@pytest.mark.parametrize("name", [COMPUTE, OTHERS[0]])
def test_a_row_that_was_counted_but_not_written_is_not_a_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """For example of a process that ended while the driver made the list."""
    full, short = CList(processes(111, 222, 333)), CList(processes(444))

    def count_one_more(handle: Any, count: Any, buffer: Any) -> int:
        code = short(handle, count, buffer)
        referent_of(count).value += 1
        return code

    library = listed(monkeypatch, {COMPUTE: full}).library
    before = DeviceClient(library=library, handle=pynvml.c_nvmlDevice_t())
    assert pids_of(list_processes(before)) == [111, 222, 333]
    CLibrary(monkeypatch, {COMPUTE: CList([]), name: count_one_more})
    after = DeviceClient(library=library, handle=pynvml.c_nvmlDevice_t())
    assert pids_of(list_processes(after)) == [444]


def test_concurrent_reads_do_not_mix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner = CList(processes(1, 2, 3)), CList(processes(8, 9))
    client = listed(monkeypatch, {COMPUTE: outer, OTHERS[0]: inner})
    library: Any = client.library
    of_inner: list[int] = []

    def read_inner() -> None:
        of_inner.extend(one.pid for one in getattr(library, OTHERS[0])(client.handle))

    def in_a_thread() -> None:
        thread = Thread(target=read_inner)
        thread.start()
        thread.join()

    outer.while_called = in_a_thread
    assert [one.pid for one in getattr(library, COMPUTE)(client.handle)] == [1, 2, 3]
    assert of_inner == [8, 9]


def test_the_call_is_made_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    row = pack("@IQII", 4711, 3 * MIB, NO_ID, NO_ID)

    def compute(_device: Any, count: Any, buffer: Any) -> int:
        assert count[0] >= 1
        count[0] = 1
        ctypes.memmove(buffer, row, len(row))
        return OK

    signature = (ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p)
    function = ctypes.CFUNCTYPE(*signature)(compute)
    (process,) = list_processes(listed(monkeypatch, {COMPUTE: function})) or ()
    assert (process.pid, process.memory_bytes) == (4711, 3 * MIB)


def test_a_library_without_c_functions_is_used_as_it_is() -> None:
    library = played().nvml
    assert with_own_lists(library) is library


def test_the_machines_own_library_reads_lists_as_well_as_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = CList(processes(7, 8))
    CLibrary(monkeypatch, {COMPUTE: compute})
    library = SystemNvml()
    assert with_own_lists(library) is library
    assert pids_of(
        list_processes(DeviceClient(library=library, handle=pynvml.c_nvmlDevice_t()))
    ) == [
        7,
        8,
    ]
    assert len(compute.rooms) == 1


def test_a_recording_has_the_lists_unchanged(tmp_path: Path) -> None:
    node = played(version="535.54.03", process_row_bytes=32)
    clock = node.clock
    header = RecordingHeader(
        time_ns=clock.time_ns(),
        monotonic_ns=clock.monotonic_ns(),
        boottime_ns=clock.boottime_ns(),
        sampling_interval_seconds=1,
        is_simulated=True,
        is_redacted=False,
    )
    with closing(Recorder(tmp_path / "recording", header, clock)) as recorder:
        recorded = RecordingLibrary(with_own_lists(node.nvml), recorder)
        # The recorder is in front, and is not bypassed.
        assert with_own_lists(recorded) is recorded
        (gpu,) = NvmlSession(recorded).open()
        pids = pids_on(gpu)
    assert pids == frozenset(process.pid for process in node.gpus[0].processes)
    _, library, _ = open_recording(tmp_path / "recording")
    (played_again,) = NvmlSession(library).open()
    assert pids_on(played_again) == pids


def pids_on(gpu: NvidiaGpu) -> frozenset[int] | None:
    listed = list_processes(gpu.client)
    return None if listed is None else frozenset(process.pid for process in listed)


def played(*, faults: Sequence[dict[str, Any]] = (), **driver: Any) -> SimulatedNode:
    """Return a node whose GPU runs five processes."""
    content = {
        "name": "lists",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}, "driver": driver}],
        "host_processes": [
            {"node": "n", "command": f"p{i}", "gpus": [0], "memory_bytes": (100 + i) * MIB}
            for i in range(5)
        ],
        "faults": list(faults),
    }
    clock = ManualClock(start_ns=EPOCH_NS + 5 * 10**9)
    simulation = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
    return simulation.nodes["n"]


def test_a_driver_that_returns_success_for_the_size_is_read() -> None:
    node = played(process_size_answer="success")
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    assert pids_on(gpu) == frozenset(process.pid for process in node.gpus[0].processes)


@pytest.mark.parametrize(
    ("version", "row_bytes"),
    [
        ("530.41.03", 24), ("535.43.02", 32), ("535.54.03", 32), ("535.86.10", 32),
        ("535.98", 24), ("535.104.05", 24), ("580.95.05", 24),
    ],
)  # fmt: skip
def test_row_lengths_follow_the_drivers_version(version: str, row_bytes: int) -> None:
    node = played(version=version, process_row_bytes=row_bytes)
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    found = list_processes(gpu.client)
    assert found
    assert {process.pid: process.memory_bytes for process in found} == {
        process.pid: process.spec.memory_bytes for process in node.gpus[0].processes
    }


class NewerDriver:
    """Claims a version with shorter rows than it writes."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802  # NVML's own name
        return "550.54.15"


def test_a_list_with_impossible_pids_is_rejected() -> None:
    node = played(version="535.54.03", process_row_bytes=32)
    library = NewerDriver(node.nvml)
    (gpu,) = NvmlSession(library).open()
    counter = NVML_ERRORS.labels(call=COMPUTE, error="ImpossiblePid")
    before = value_of(counter)
    assert list_processes(gpu.client) is None
    assert value_of(counter) == before + 1


@pytest.mark.parametrize("failures", [1, 2])
def test_a_list_that_grows_meanwhile_is_read_again(failures: int) -> None:
    growing = {"node": "n", "kind": "growing_list", "calls": [COMPUTE], "failures": failures}
    node = played(process_size_answer="success", faults=[growing])
    (gpu,) = NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()
    assert len(pids_on(gpu) or ()) == 5

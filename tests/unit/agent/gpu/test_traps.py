"""The traps of process lists and samples, with the real functions of nvidia-ml-py.

The library under them consists of function pointers; the test chooses codes and counts.
"""
# ruff: noqa: ANN401  # the functions of nvidia-ml-py have no types

from collections.abc import Callable, Iterable
from typing import Any

import pynvml
import pytest

from gpuledger.records import ProcessKind
from gpuledger_agent.core.raw import CallGroup, ProcessUtilizationSample, RawGpuSample, SampleCursor
from gpuledger_agent.gpu.nvidia.device_client import call_by_name
from gpuledger_agent.gpu.protocol import UnsupportedError
from gpuledger_agent.metrics import NVML_ERRORS
from tests.fakes.nvml_pointers import play_gpu, referent_of
from tests.metric_values import value_of

SAMPLES = "nvmlDeviceGetProcessUtilization"
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
OK: int = pynvml.NVML_SUCCESS
GREW: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
NONE: int = pynvml.NVML_ERROR_NOT_FOUND
TIMEOUT: int = pynvml.NVML_ERROR_TIMEOUT
NO_ID, NO_BYTES = 2**32 - 1, 2**64 - 1

Functions = dict[str, Callable[..., int]]
Answer = Callable[[Functions], RawGpuSample]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Return the result of a GPU over a library that has only these functions."""

    def give(functions: Functions) -> RawGpuSample:
        gpu = play_gpu(monkeypatch, functions)
        return RawGpuSample(
            uuid="GPU-0", index=0, **gpu.query(CallGroup.USAGE, SampleCursor(process_us=5))
        )

    return give


def samples_of(codes: Iterable[int], *, rows: int = 1) -> Functions:
    """Return sample calls that end with these codes one after another, and fill `rows` rows."""
    given = iter(codes)

    def sample(_: Any, filled: Any, count: Any, last_seen: Any) -> int:
        assert last_seen.value == 5
        referent_of(count).value = rows
        for place in range(rows if filled is not None else 0):
            filled[place].pid, filled[place].timeStamp = 7 + place, 9
            filled[place].smUtil, filled[place].memUtil = 40, 30
        return next(given)

    return {SAMPLES: sample}


def list_of(codes: Iterable[int], rows: Iterable[tuple[int, int, int, int]] = ()) -> Any:
    """Return a list call that ends with these codes and fills in (pid, bytes, GI, CI)."""
    given, found = iter(codes), list(rows)

    def fill(_: Any, count: Any, filled: Any) -> int:
        referent_of(count).value = len(found)
        for place, row in enumerate(found if filled is not None else ()):
            process = filled[place]
            process.pid, process.usedGpuMemory, process.gpuInstanceId, process.computeInstanceId = (
                row
            )
        return next(given)

    return fill


SEEN = (ProcessUtilizationSample(pid=7, timestamp_us=9, sm_percent=40, memory_percent=30),)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param([OK], (), id="success without rows is an error of value 0 to the wrapper"),
        pytest.param([NONE], (), id="not found means nothing new"),
        pytest.param([GREW, NONE], (), id="gone between the two calls"),
        pytest.param([GREW, OK], SEEN, id="the usual way"),
        pytest.param([GREW, GREW, GREW, OK], SEEN, id="grew once"),
        pytest.param([GREW, GREW, GREW, GREW, GREW, OK], SEEN, id="grew twice"),
        pytest.param([GREW] * 6, None, id="grew three times: not known"),
        pytest.param([TIMEOUT], None, id="failed: not known"),
        pytest.param([pynvml.NVML_ERROR_NOT_SUPPORTED], None, id="not supported: absent"),
        pytest.param([pynvml.NVML_ERROR_NO_PERMISSION], None, id="not allowed: absent"),
    ],
)
def test_process_samples_match_the_meaning_of_the_drivers_return_codes(
    answer: Answer, codes: list[int], expected: object
) -> None:
    assert answer(samples_of(codes)).process_samples == expected


def test_a_list_that_keeps_growing_is_counted_as_an_error(answer: Answer) -> None:
    counter = NVML_ERRORS.labels(call=SAMPLES, error="InsufficientSize")
    before = value_of(counter)
    answer(samples_of([GREW] * 6))
    assert value_of(counter) == before + 1


def test_fewer_rows_than_announced_are_not_processes_with_pid_0(answer: Answer) -> None:
    """The data call may return less than the size call announced; the rest is zeros."""
    sizes = iter([3, 1])

    def sample(_: Any, filled: Any, count: Any, __: Any) -> int:
        referent_of(count).value = next(sizes)
        if filled is None:
            return GREW
        filled[0].pid, filled[0].timeStamp, filled[0].smUtil, filled[0].memUtil = 7, 9, 40, 30
        return OK

    assert answer({SAMPLES: sample}).process_samples == SEEN


@pytest.mark.parametrize(
    ("codes", "pids"),
    [
        pytest.param([OK], [], id="success without rows"),
        pytest.param([NONE], [], id="not found"),
        pytest.param([GREW, OK], [7], id="the usual way"),
        pytest.param([GREW, GREW, GREW, OK], [7], id="grew once"),
        pytest.param([GREW] * 6, None, id="grew three times"),
        pytest.param([TIMEOUT], None, id="failed"),
    ],
)
def test_process_lists_match_the_meaning_of_the_drivers_return_codes(
    answer: Answer, codes: list[int], pids: list[int] | None
) -> None:
    processes = answer({COMPUTE: list_of(codes, [(7, 1, NO_ID, NO_ID)])}).processes
    assert (None if processes is None else [one.pid for one in processes]) == pids


@pytest.mark.parametrize("broken", [COMPUTE, GRAPHICS, MPS])
def test_one_list_that_failed_leaves_all_processes_unknown(answer: Answer, broken: str) -> None:
    """Half a list would end the processes of the other half."""
    functions = {name: list_of([GREW, OK], [(7, 1, NO_ID, NO_ID)]) for name in (COMPUTE, MPS)}
    assert answer({**functions, broken: list_of([TIMEOUT])}).processes is None


def test_memory_and_instances_that_the_driver_does_not_report_are_unknown(answer: Answer) -> None:
    rows = [(7, NO_BYTES, NO_ID, NO_ID), (8, 5, 0, 0)]
    (one, other) = answer({COMPUTE: list_of([GREW, OK], rows)}).processes or ()
    assert (one.memory_bytes, one.gpu_instance, one.compute_instance) == (None, None, None)
    assert (other.memory_bytes, other.gpu_instance, other.compute_instance) == (5, 0, 0)


def test_each_list_has_its_own_kind(answer: Answer) -> None:
    functions = {
        name: list_of([GREW, OK], [(7 + place, 1, NO_ID, NO_ID)])
        for place, name in enumerate((COMPUTE, GRAPHICS, MPS))
    }
    processes = answer(functions).processes or ()
    assert {one.pid: one.kind for one in processes} == {
        7: ProcessKind.COMPUTE,
        8: ProcessKind.GRAPHICS,
        9: ProcessKind.MPS,
    }


@pytest.mark.parametrize(
    "name", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"]
)
def test_a_mismatched_unversioned_function_is_not_supported(answer: Answer, name: str) -> None:
    """Its error is not an `NVMLError`, and would end the thread that calls it."""
    answer({})
    with pytest.raises(UnsupportedError):
        call_by_name(pynvml, name, pynvml.c_nvmlDevice_t())


def test_gaps_among_instances_are_skipped(answer: Answer) -> None:
    requested: list[int] = []

    def mode(_: Any, current: Any, pending: Any) -> int:
        referent_of(current).value = referent_of(pending).value = 1
        return OK

    def most(_: Any, count: Any) -> int:
        referent_of(count).value = 4
        return OK

    def handle(_: Any, index: Any, __: Any) -> int:
        requested.append(index.value)
        return OK if index.value == 2 else NONE

    def uuid(_: Any, text: Any, __: Any) -> int:
        text.value = b"MIG-2"
        return OK

    given = answer(
        {
            "nvmlDeviceGetMigMode": mode,
            "nvmlDeviceGetMaxMigDeviceCount": most,
            "nvmlDeviceGetMigDeviceHandleByIndex": handle,
            "nvmlDeviceGetUUID": uuid,
        }
    )
    assert requested == [0, 1, 2, 3]
    assert [instance.uuid for instance in given.instances] == ["MIG-2"]

"""The driver's process accounts: each is read once, when the process has closed the GPU."""
# ruff: noqa: ANN401  # the structs of nvidia-ml-py have no types

from ctypes import c_uint
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpuledger.records import ProcessKind
from gpuledger_agent.core.raw import ListedProcess, ProcessAccounting
from gpuledger_agent.gpu.nvidia.accounting import AccountingReader
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from tests.fakes.nvml_pointers import Function, play, referent_of

MODE = "nvmlDeviceGetAccountingMode"
PIDS = "nvmlDeviceGetAccountingPids"
STATS = "nvmlDeviceGetAccountingStats"


class Buffer:
    """A driver's ring buffer of accounts."""

    def __init__(self, *, has_v2: bool = True) -> None:
        self.mode: int = pynvml.NVML_FEATURE_ENABLED
        self.accounts: dict[int, SimpleNamespace] = {}
        self.requests: list[int] = []
        self.has_v2 = has_v2
        self.errors: dict[str, int] = {}

    def add(self, pid: int, *, running: bool = False, **values: Any) -> None:
        usual = {
            "gpuUtilization": 40,
            "memoryUtilization": 20,
            "maxMemoryUsage": 5,
            "time": 0 if running else 1500,
            "startTime": 1_000_000,
            "isRunning": int(running),
        }
        if self.has_v2:
            usual |= {"sampleCount": 8, "sumGpuUtil": 33_320, "sumFbUtil": 800}
        self.accounts[pid] = SimpleNamespace(**(usual | values))

    def nvmlDeviceGetAccountingMode(self, _: Any) -> int:  # noqa: N802  # NVML's name
        self._fail(MODE)
        return self.mode

    def nvmlDeviceGetAccountingPids(self, _: Any) -> list[int]:  # noqa: N802  # NVML's name
        self._fail(PIDS)
        return list(self.accounts)

    def nvmlDeviceGetAccountingStats_v2(self, _: Any, pid: int) -> Any:  # noqa: N802  # NVML's name
        if not self.has_v2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self._give(pid)

    def nvmlDeviceGetAccountingStats(self, _: Any, pid: int) -> Any:  # noqa: N802  # NVML's name
        return self._give(pid)

    def _give(self, pid: int) -> Any:
        self.requests.append(pid)
        if pid not in self.accounts:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.accounts[pid]

    def _fail(self, name: str) -> None:
        if name in self.errors:
            raise pynvml.NVMLError(self.errors[name])


def on(buffer: Buffer) -> AccountingReader:
    return AccountingReader(client=DeviceClient(library=buffer, handle="gpu"))


def query(accounting: AccountingReader, *listed: int) -> tuple[ProcessAccounting, ...] | None:
    return accounting.query(
        [ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=1) for pid in listed]
    )


def pids(answer: tuple[ProcessAccounting, ...] | None) -> list[int]:
    assert answer is not None
    return [account.pid for account in answer]


def test_processes_that_ended_before_the_first_query_are_not_reported() -> None:
    buffer = Buffer()
    buffer.add(1)
    assert query(on(buffer)) == ()
    assert buffer.requests == []


def test_a_process_is_queried_only_after_it_has_ended() -> None:
    buffer = Buffer()
    buffer.add(1, running=True)
    accounting = on(buffer)
    assert [pids(query(accounting, 1)) for _ in range(3)] == [[], [], []]
    assert buffer.requests == []
    buffer.add(1)
    assert pids(query(accounting)) == [1]
    assert buffer.requests == [1]


def test_a_process_that_no_list_ever_showed_is_queried() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    buffer.add(7)
    assert pids(query(accounting)) == [7]


def test_a_process_that_returns_between_two_queries_is_reported_each_time() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    published: list[tuple[int, int]] = []
    for second in range(1, 12):
        # Meanwhile other processes come and go, once each.
        buffer.add(100 + second, startTime=second)
        if second % 3 == 0:
            buffer.add(7, startTime=second)
        new = {(one.pid, one.started_us or 0) for one in query(accounting) or ()}
        published += sorted(new - set(published))
    assert [started for pid, started in published if pid == 7] == [3, 6, 9]
    assert len(published) == 3 + 11


def test_only_a_few_accounts_are_queried_again() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    for pid in range(1, 50):
        buffer.add(pid)
    query(accounting)
    buffer.requests.clear()
    query(accounting)
    assert len(buffer.requests) == 8


def test_a_process_that_still_runs_is_queried_until_it_ends() -> None:
    """Its context was created after the lists were read, or is not torn down yet."""
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    buffer.add(7, running=True)
    assert pids(query(accounting)) == []
    buffer.add(7)
    assert pids(query(accounting)) == [7]


def test_each_account_is_returned_three_times() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    buffer.add(7)
    assert [pids(query(accounting)) for _ in range(5)] == [[7], [7], [7], [], []]


def test_sums_give_exact_percentages() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    buffer.add(7)
    assert query(accounting) == (
        ProcessAccounting(
            pid=7,
            started_us=1_000_000,
            lived_ms=1500,
            gpu_percent=41.65,
            memory_percent=1.0,
            max_memory_bytes=5,
        ),
    )


@pytest.mark.parametrize("changes", [{}, {"sampleCount": 0, "sumGpuUtil": 0, "sumFbUtil": 0}])
def test_without_sums_the_whole_percents_are_used(changes: dict[str, Any]) -> None:
    buffer = Buffer(has_v2=bool(changes))
    accounting = on(buffer)
    query(accounting)
    buffer.add(7, **changes)
    (account,) = query(accounting) or ()
    assert (account.gpu_percent, account.memory_percent) == (40, 20)


def test_values_that_the_driver_does_not_report_are_unknown() -> None:
    buffer = Buffer(has_v2=False)
    accounting = on(buffer)
    query(accounting)
    buffer.add(7, gpuUtilization=2**32 - 1, memoryUtilization=2**32 - 1, maxMemoryUsage=2**64 - 1)
    (account,) = query(accounting) or ()
    assert account.gpu_percent is account.memory_percent is account.max_memory_bytes is None


@pytest.mark.parametrize(
    "errors",
    [
        {MODE: pynvml.NVML_ERROR_NOT_SUPPORTED},
        {MODE: pynvml.NVML_ERROR_FUNCTION_NOT_FOUND},
        {PIDS: pynvml.NVML_ERROR_NOT_SUPPORTED},
    ],
)
def test_a_driver_without_accounting_returns_none(errors: dict[str, int]) -> None:
    buffer = Buffer()
    buffer.errors = errors
    assert query(on(buffer)) is None


def test_accounting_that_is_enabled_later_starts_then() -> None:
    buffer = Buffer()
    buffer.mode = pynvml.NVML_FEATURE_DISABLED
    accounting = on(buffer)
    buffer.add(1)
    assert query(accounting) is None
    buffer.mode = pynvml.NVML_FEATURE_ENABLED
    assert query(accounting) == ()
    buffer.add(2)
    assert pids(query(accounting)) == [2]


def test_a_list_that_failed_ends_no_process() -> None:
    buffer = Buffer()
    buffer.add(1, running=True)
    accounting = on(buffer)
    query(accounting, 1)
    assert accounting.query(None) == ()
    assert buffer.requests == []


def test_a_burst_is_queried_in_parts() -> None:
    buffer = Buffer()
    accounting = on(buffer)
    query(accounting)
    for pid in range(1, 101):
        buffer.add(pid)
    reported = set(pids(query(accounting)))
    assert len(reported) == len(buffer.requests) == 64
    reported |= set(pids(query(accounting)))
    assert reported == set(range(1, 101))
    assert len(buffer.requests) <= 100 + 8


def test_an_account_that_the_ring_buffer_has_lost_is_not_queried() -> None:
    buffer = Buffer()
    buffer.add(1, running=True)
    accounting = on(buffer)
    query(accounting, 1)
    del buffer.accounts[1]
    assert query(accounting) == ()
    assert buffer.requests == []


# The real functions of nvidia-ml-py, over a library of nothing but function pointers.


def test_the_real_wrapper_fails_without_a_reported_memory_and_we_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes None into a field of a C struct, which raises TypeError."""
    remembered: list[int] = []

    def mode(_: Any, enabled: Any) -> int:
        referent_of(enabled).value = pynvml.NVML_FEATURE_ENABLED
        return 0

    def size(_: Any, count: Any) -> int:
        referent_of(count).value = 4000
        return 0

    def list_pids(_: Any, count: Any, found: Any) -> int:
        referent_of(count).value = len(remembered)
        for place, pid in enumerate(remembered):
            found[place] = pid
        return 0

    def stats(_: Any, pid: c_uint, filled: Any) -> int:
        referent_of(filled).time = 10
        referent_of(filled).maxMemoryUsage = 2**64 - 1 if pid.value == 7 else 3
        return 0

    functions: dict[str, Function] = {
        MODE: mode,
        "nvmlDeviceGetAccountingBufferSize": size,
        PIDS: list_pids,
        STATS: stats,
    }

    accounting = AccountingReader(client=play(monkeypatch, functions))
    assert query(accounting) == ()
    remembered += [7, 8]
    assert pids(query(accounting)) == [8]

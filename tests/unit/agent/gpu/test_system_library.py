"""The machine's own library: found in the usual directories; its samples are read in one call.

The samples come from a library of nothing but function pointers; the library that is loaded is the
one that plays NVML for the benchmarks.
"""
# ruff: noqa: ANN401  # ctypes' pointers and structs have no types

import ctypes
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from benchmarks.nvml_stub.build import build_stub
from gpuledger_agent.core.raw import SampleCursor
from gpuledger_agent.gpu.nvidia.core import ProcessLists, query_core
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.nvidia.system_library import (
    FOLDERS,
    LIBRARY,
    LibraryNotFoundError,
    SystemNvml,
    load_library,
)
from gpuledger_agent.gpu.protocol import DriverNotLoadedError
from tests.fakes.nvml_pointers import CLibrary, referent_of

OK: int = pynvml.NVML_SUCCESS
GREW: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
NONE: int = pynvml.NVML_ERROR_NOT_FOUND


class Loader:
    """Loads libraries at these paths, and records which paths were tried."""

    def __init__(self, *there: str) -> None:
        self.there = there
        self.tried: list[str] = []

    def __call__(self, name: str) -> str:
        self.tried.append(name)
        if name not in self.there:
            raise OSError(f"{name}: cannot open shared object file")
        return f"loaded {name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_library_is_found_in_each_directory_where_installations_have_it(folder: Path) -> None:
    path = str(folder / LIBRARY)
    assert load_library(None, load=Loader(path)) == (f"loaded {path}", path)


def test_the_setting_comes_first_then_the_dynamic_linker() -> None:
    elsewhere = "/opt/nvidia/libnvidia-ml.so.580"
    load = Loader(LIBRARY, elsewhere, *(str(folder / LIBRARY) for folder in FOLDERS))
    assert load_library(None, load=load)[0] == f"loaded {LIBRARY}"
    assert load_library(Path(elsewhere), load=load) == (f"loaded {elsewhere}", elsewhere)
    assert load.tried == [LIBRARY, elsewhere]


def test_the_setting_may_name_a_directory(tmp_path: Path) -> None:
    path = str(tmp_path / LIBRARY)
    assert load_library(tmp_path, load=Loader(path))[1] == path


def test_the_error_for_a_missing_library_names_all_paths_tried_and_the_setting() -> None:
    load = Loader()
    with pytest.raises(LibraryNotFoundError) as caught:
        load_library(None, load=load)
    assert load.tried == [LIBRARY, *(str(folder / LIBRARY) for folder in FOLDERS)]
    assert all(str(folder) in str(caught.value) for folder in FOLDERS)
    assert "nvml_library" in str(caught.value)


def test_a_configured_path_has_no_fallback() -> None:
    load = Loader(LIBRARY)
    with pytest.raises(
        LibraryNotFoundError, match=r"nvml_library: /nowhere/lib\.so does not exist"
    ):
        load_library(Path("/nowhere/lib.so"), load=load)
    assert load.tried == ["/nowhere/lib.so"]


def test_a_library_that_cannot_be_loaded_is_named_with_the_reason(
    tmp_path: Path,
) -> None:
    """For example one of another architecture, or one that the container toolkit mounted empty."""
    empty = tmp_path / LIBRARY
    empty.touch()
    with pytest.raises(LibraryNotFoundError, match=f"{empty}: .*file too short"):
        load_library(None, folders=[tmp_path], load=no_linker)


def no_linker(name: str) -> Any:
    """Load like a linker that does not find the library by name."""
    if "/" not in name:
        raise OSError(f"{name}: not found")
    return ctypes.CDLL(name)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make nvidia-ml-py look as if it had loaded nothing, and restore it."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


@pytest.mark.usefixtures("unloaded")
@pytest.mark.skipif(shutil.which("cc") is None, reason="building the stub needs a C compiler")
def test_a_library_in_a_known_directory_is_the_one_that_answers(tmp_path: Path) -> None:
    """The stub reports that it has no driver, which shows that it was used."""
    empty, folder = tmp_path / "empty", tmp_path / "driver"
    empty.mkdir()
    folder.mkdir()
    made = build_stub(folder)
    session = NvmlSession(SystemNvml(folders=[empty, folder], load=no_linker))
    assert session.origin == ""
    with capture_logs() as logs, pytest.raises(DriverNotLoadedError):
        session.open()
    assert session.origin == str(made)
    assert {"event": "nvml_library_loaded", "log_level": "info", "library": str(made)} in logs


@pytest.mark.usefixtures("unloaded")
def test_a_library_that_is_installed_later_is_found_when_opened_again(tmp_path: Path) -> None:
    load = Loader()
    nvml = SystemNvml(folders=[tmp_path], load=load)
    for _ in range(2):
        with pytest.raises(LibraryNotFoundError):
            NvmlSession(nvml).open()
    assert load.tried.count(LIBRARY) == 2


class Ring:
    """Plays a ring buffer of (stamp, percent) `rows`; rows without room are left out."""

    def __init__(self, rows: Iterable[tuple[int, int]] = (), *, reports_it: bool = False) -> None:
        self.rows = list(rows)
        self.reports_it = reports_it
        """Whether it rejects an array without room for all."""
        self.requests: list[int] = []
        """The room of each call."""

    def __call__(self, _: Any, __: Any, since: Any, value_type: Any, count: Any, room: Any) -> int:
        newer = [row for row in self.rows if row[0] > since.value]
        given = referent_of(count).value
        self.requests.append(given if room is not None else 0)
        referent_of(value_type).value = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        if room is None:
            referent_of(count).value = len(newer)
            return OK
        if not newer:
            return NONE
        if self.reports_it and given < len(newer):
            referent_of(count).value = len(newer)
            return GREW
        for index, (stamp, percent) in enumerate(newer[:given]):
            room[index].timeStamp, room[index].sampleValue.uiVal = stamp, percent
        referent_of(count).value = min(given, len(newer))
        return OK


def samples_of(nvml: SystemNvml, since_us: int = 0) -> list[tuple[int, int]]:
    client = DeviceClient(library=nvml, handle=pynvml.c_nvmlDevice_t())
    found = query_core(
        client, SampleCursor(gpu_us=since_us), ProcessLists(), monotonic_ns=time.monotonic_ns
    )["samples"]
    return [(sample.timestamp_us, sample.percent) for sample in found]


@pytest.mark.parametrize("reports_it", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 4096])
def test_all_samples_of_the_ring_are_read_whatever_room_there_was(
    monkeypatch: pytest.MonkeyPatch, rows: int, *, reports_it: bool
) -> None:
    ring = Ring([(1, 10), (2, 20)], reports_it=reports_it)
    CLibrary(monkeypatch, {"nvmlDeviceGetSamples": ring})
    nvml = SystemNvml()
    assert samples_of(nvml) == [(1, 10), (2, 20)]
    ring.rows = [(10 + number, number % 100) for number in range(rows)]
    assert samples_of(nvml) == ring.rows


def test_samples_that_fit_are_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring([(1, 10)])
    CLibrary(monkeypatch, {"nvmlDeviceGetSamples": ring})
    nvml = SystemNvml()
    samples_of(nvml)
    for stamp in range(2, 12):
        before = len(ring.requests)
        ring.rows.append((stamp, stamp))
        assert samples_of(nvml, since_us=stamp - 1) == [(stamp, stamp)]
        # One for the GPU and one for its memory.
        assert len(ring.requests) == before + 2


def test_an_impossible_count_is_rejected_without_allocating_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def boundless(*arguments: Any) -> int:
        referent_of(arguments[4]).value = 2**32 - 1
        return GREW

    CLibrary(monkeypatch, {"nvmlDeviceGetSamples": boundless})
    client = DeviceClient(library=SystemNvml(), handle=pynvml.c_nvmlDevice_t())
    assert (
        query_core(client, SampleCursor(), ProcessLists(), monotonic_ns=time.monotonic_ns)[
            "samples"
        ]
        is None
    )


class Processes:
    """Plays the samples of these processes."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.pids = list(pids)
        self.filled: int | None = None
        """The number of rows that are filled, if it differs from the number counted."""
        self.calls = 0

    def __call__(self, _: Any, room: Any, count: Any, __: Any) -> int:
        self.calls += 1
        given, referent_of(count).value = referent_of(count).value, len(self.pids)
        if not self.pids:
            return NONE
        if room is None or given < len(self.pids):
            return GREW
        for index, pid in enumerate(self.pids[: self.filled]):
            room[index].pid, room[index].timeStamp, room[index].smUtil = pid, 9, 40
        return OK


def pids_of(nvml: SystemNvml) -> list[int]:
    client = DeviceClient(library=nvml, handle=pynvml.c_nvmlDevice_t())
    found = query_core(client, SampleCursor(), ProcessLists(), monotonic_ns=time.monotonic_ns)[
        "process_samples"
    ]
    return [sample.pid for sample in found]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_the_samples_of_all_processes_are_read(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    played = Processes(range(1, count + 1))
    CLibrary(monkeypatch, {"nvmlDeviceGetProcessUtilization": played})
    nvml = SystemNvml()
    assert pids_of(nvml) == played.pids
    played.calls = 0
    assert pids_of(nvml) == played.pids
    assert played.calls == 1


def test_rows_that_are_counted_but_not_filled_do_not_repeat_the_previous_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Processes([7, 8, 9])
    CLibrary(monkeypatch, {"nvmlDeviceGetProcessUtilization": played})
    nvml = SystemNvml()
    assert pids_of(nvml) == [7, 8, 9]
    played.filled = 1
    assert pids_of(nvml) == [7, 0, 0], "no process has pid 0, so its samples are dropped"

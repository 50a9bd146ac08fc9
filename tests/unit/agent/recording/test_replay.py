"""A recording, played again, is the machine that was recorded."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.clock import Clock
from gpuledger.codec import encode
from gpuledger.errors import UserError
from gpuledger.keys import NodeId
from gpuledger.records import NodeSample, ProcessRecord
from gpuledger_agent.core.tick import NodeTick
from gpuledger_agent.gpu.nvidia.catalogue import CATALOGUE, FunctionCall
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.host.procfs import Procfs
from gpuledger_agent.recording.format import (
    RecordingHeader,
    is_played,
    read_recording,
    refuse_result,
)
from gpuledger_agent.recording.recorder import (
    Recorder,
    RecordingFile,
    RecordingLibrary,
    RecordingProcfs,
)
from gpuledger_agent.recording.replay import ReplayClock, ReplayLibrary, ReplayProcfs
from gpuledger_agent.recording.serialize import Handles, build, fill, to_json
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.errors import has_words
from tests.ticks import tick_of

QUICKSTART = Path(__file__).parents[4] / "scenarios" / "quickstart.yaml"
EPOCH_NS = 1_795_000_000_000_000_000
LATER_NS = EPOCH_NS + 86_400_000_000_123_456


@dataclass
class Node:
    nvml: Any
    procfs: Procfs
    clock: Clock
    hand: ManualClock

    def ticks(self, waits: list[float]) -> list[NodeTick]:
        """Sample as the agent does, after each wait."""
        nvml = NvmlSession(self.nvml, monotonic_ns=self.clock.monotonic_ns)
        gpus = nvml.open()
        sampler = Sampler(node=NodeId("default", "node"), procfs=self.procfs)
        made = []
        for wait in [0.0, *waits]:
            self.hand.advance(wait)
            tick = tick_of(sampler, gpus, self.clock)
            made.extend([tick] if tick else [])
        nvml.close()
        return made


def simulated(name: str) -> Node:
    hand = ManualClock(start_ns=EPOCH_NS + 7_000_000_000)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=hand)
    node = simulation.node(name)
    return Node(node.nvml, node.procfs, node.clock, hand)


def record(node: Node, file: Path, waits: list[float], *, tick_seconds: float) -> list[NodeTick]:
    header = RecordingHeader(
        time_ns=node.clock.time_ns(),
        monotonic_ns=node.clock.monotonic_ns(),
        boottime_ns=node.clock.boottime_ns(),
        tick_seconds=tick_seconds,
        is_simulated=True,
        is_redacted=False,
    )
    tape = RecordingFile(file, header)
    recorder = Recorder(tape, node.clock, began_monotonic_ns=header.monotonic_ns)
    recording = Node(
        RecordingLibrary(node.nvml, recorder),
        RecordingProcfs(node.procfs, recorder),
        node.clock,
        node.hand,
    )
    ticks = recording.ticks(waits)
    tape.close()
    return ticks


def played(file: Path) -> Node:
    header, lines = read_recording(file)
    hand = ManualClock(start_ns=LATER_NS)
    clock = ReplayClock(header, hand)
    library = ReplayLibrary(header, lines, clock)
    return Node(library, ReplayProcfs(header, lines, clock), clock, hand)


def encoded(ticks: list[NodeTick], *, moved_ns: int = 0) -> list[bytes]:
    """Return the ticks as they are published, at times that are earlier by so much."""
    published: list[NodeSample | ProcessRecord] = []
    for tick in ticks:
        published += [tick.sample, *tick.processes]
    return [encode(replace(one, time_ns=one.time_ns - moved_ns)) for one in published]


@given(
    name=st.sampled_from(["gpu-node-1", "gpu-node-2"]),
    waits=st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=6),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_played_recording_gives_the_ticks_of_the_recorded_machine(
    tmp_path: Path, name: str, waits: list[float]
) -> None:
    file = tmp_path / "recording.jsonl"
    recorded = record(simulated(name), file, waits, tick_seconds=0.25)
    node = played(file)
    again = node.ticks(waits)
    assert len(recorded) == len(waits)
    assert any(gpu.utilization_ratio for gpu in recorded[-1].sample.gpus)
    moved_ns = node.clock.time_ns() - node.clock.monotonic_ns() - (EPOCH_NS + 7_000_000_000)
    assert encoded(again, moved_ns=moved_ns) == encoded(recorded)


def test_a_compressed_recording_is_read_like_any_other(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    record(simulated("gpu-node-1"), packed, [1.0], tick_seconds=1)
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert packed.stat().st_size < plain.stat().st_size / 4
    assert read_recording(packed) == read_recording(plain)


@given(at=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
@settings(deadline=None)
def test_a_compressed_recording_with_any_byte_changed_is_read_or_its_mistake_is_said(
    compressed: Path, at: int, flip: int
) -> None:
    data = bytearray(compressed.read_bytes())
    data[at % len(data)] ^= flip
    changed = compressed.with_name("changed.jsonl.gz")
    changed.write_bytes(data)
    mistake = str(changed)
    try:
        read_recording(changed)
    except UserError as error:
        mistake = str(error)
    assert str(changed) in mistake


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recording") / "recording.jsonl.gz"
    record(simulated("gpu-node-1"), file, [1.0], tick_seconds=1)
    return file


def test_after_its_end_a_recording_has_no_driver_any_more(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0, 1.0], tick_seconds=1)
    node = played(file)
    node.ticks([1.0, 1.0])
    node.hand.advance(2)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        node.nvml.nvmlDeviceGetCount()


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a recording whose lines but the header are changed."""
    header, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    changed = file.with_name("changed.jsonl")
    changed.write_text("\n".join(map(json.dumps, [header, *lines])))
    return changed


@pytest.mark.parametrize("name", ["nvmlShutdown", "sys", "NVMLError", "no_such_name", 7, None])
def test_a_recording_names_no_function_of_the_library_as_a_struct(
    tmp_path: Path, name: object
) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0], tick_seconds=1)
    changed = rewritten(file, lambda line: line.update(result={"struct": name, "fields": {}}))
    with pytest.raises(UserError, check=has_words("line 2")):
        read_recording(changed)


@pytest.mark.parametrize("tick_seconds", [0, -1, 1e300])
def test_a_recording_whose_ticks_have_no_length_is_refused(
    tmp_path: Path, tick_seconds: float
) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0], tick_seconds=tick_seconds)

    with pytest.raises(UserError, check=has_words("line 1", "tick_seconds")):
        read_recording(file)


def test_a_struct_is_filled_in_its_own_fields_alone() -> None:
    struct = pynvml.c_nvmlMemory_t()
    fill(struct, {"total": 7, "__class__": {"fields": {"total": 8}}}, Handles(), keep)
    assert struct.total == 7
    assert not isinstance(type(struct).__dict__["total"], int)


def test_a_union_takes_its_bits_and_no_more() -> None:
    value = pynvml.c_nvmlFieldValue_t()
    fill(value, {"value": {"bits": 2**64 - 1}}, Handles(), keep)
    assert value.value.ullVal == 2**64 - 1
    with pytest.raises(OverflowError):
        fill(value, {"value": {"bits": 2**64}}, Handles(), keep)


def keep(_name: str, value: int) -> int:
    return value


def answered(line: dict[str, Any], call: str, result: object) -> None:
    """Let a call have given another result."""
    if str(line.get("call", "")).startswith(call):
        line.pop("error", None)
        line["result"] = result


DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
IMPOSSIBLE = {
    "processes at an address": (
        "nvmlDeviceGetComputeRunningProcesses",
        {"handle": 1, "of": "c_nvmlProcessInfo_t"},
    ),
    "processes as a handle": (
        "nvmlDeviceGetComputeRunningProcesses",
        {"handle": 1, "of": "struct_c_nvmlDevice_t"},
    ),
    "fields at an address": (
        "nvmlDeviceGetFieldValues",
        {"handle": 1, "of": "c_nvmlFieldValue_t"},
    ),
    "samples at an address": (
        "nvmlDeviceGetSamples",
        {"tuple": [0, {"handle": 1, "of": "c_nvmlSample_t"}]},
    ),
    "an energy that is a handle": ("nvmlDeviceGetTotalEnergyConsumption", {"handle": 1}),
    "a power of no kind": ("nvmlDeviceGetPowerUsage", {"evil": 1}),
    "a power of two kinds": ("nvmlDeviceGetPowerUsage", {"handle": 1, "float": "1"}),
    "an empty power": ("nvmlDeviceGetPowerUsage", {}),
    "no power": ("nvmlDeviceGetPowerUsage", None),
    "a power that is deep": ("nvmlDeviceGetPowerUsage", DEEP),
    "a memory without end": ("nvmlDeviceGetMemoryInfo", {"bytes": "0g"}),
    "a text in a number's place": (
        "nvmlDeviceGetMemoryInfo",
        {"struct": "c_nvmlMemory_t", "fields": {"total": "x"}},
    ),
    "bits in a number's place": (
        "nvmlDeviceGetMemoryInfo",
        {"struct": "c_nvmlMemory_t", "fields": {"total": {"bits": 1}}},
    ),
    "another struct": ("nvmlDeviceGetMemoryInfo", {"struct": "c_nvmlSample_t", "fields": {}}),
    "a UUID that is a number": ("nvmlDeviceGetUUID", 5),
    "a UUID without end": ("nvmlDeviceGetUUID", "x" * 5000),
    "a handle below zero": ("nvmlDeviceGetHandleByIndex", {"handle": -1}),
    "a handle that is a text": ("nvmlDeviceGetHandleByIndex", {"handle": "a"}),
    "a handle that is a list": ("nvmlDeviceGetHandleByIndex", {"handle": [1]}),
}


@pytest.mark.parametrize(("call", "result"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_result_that_its_function_cannot_have_given_is_refused(
    tmp_path: Path, call: str, result: object
) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0], tick_seconds=1)
    changed = rewritten(file, lambda line: answered(line, call, result))
    with pytest.raises(UserError, check=has_words("changed.jsonl, line ", "record-nvml")):
        read_recording(changed)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("nvmlGpmMetricsGet", []),
        ("nvmlGpmMetricsGet", [5]),
        ("nvmlGpmMetricsGet", [{"byref": {"struct": "c_nvmlGpmMetricsGet_t", "fields": {}}}]),
        ("nvmlGpmSampleGet", [1]),
        ("nvmlGpmSampleGet", [{"handle": 1}, 5]),
        ("nvmlDeviceGetSamples", []),
    ],
)
def test_arguments_that_a_call_cannot_have_had_are_refused(
    tmp_path: Path, call: str, arguments: list[object]
) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0], tick_seconds=1)
    with file.open("a") as opened:
        opened.write(json.dumps({"at_ns": 1, "call": call, "arguments": arguments, "error": 3}))
    with pytest.raises(UserError, check=has_words("line ", "record-nvml")):
        read_recording(file)


def test_every_function_that_the_agent_calls_can_be_played() -> None:
    catalogued = {
        source.name
        for specs in CATALOGUE.values()
        for spec in specs
        for source in spec.sources
        if isinstance(source, FunctionCall)
    }
    named = {name for name in vars(NvmlLibrary) if name.startswith("nvml")}
    assert [name for name in sorted(catalogued | named) if not is_played(name)] == []


def test_text_that_the_driver_garbles_is_garbled_again(tmp_path: Path) -> None:
    node = simulated("gpu-node-1")
    file = tmp_path / "recording.jsonl"
    record(node, file, [1.0], tick_seconds=1)

    def garble(line: dict[str, Any]) -> None:
        if line.get("call") == "nvmlDeviceGetName":
            del line["result"]
            line["failure"] = "not_text"

    ticks = played(rewritten(file, garble)).ticks([1.0])
    assert {gpu.model for gpu in ticks[0].sample.gpus} == {None}


def test_bytes_that_are_no_text_are_written_and_read() -> None:
    struct = pynvml.c_nvmlPlatformInfo_v2_t()
    struct.ibGuid, struct.trayIndex = b"\xff\x01", b"\xc8"
    again = build(to_json(struct, Handles()))
    assert bytes(again) == bytes(struct)


def test_a_struct_takes_no_address() -> None:
    with pytest.raises(ValueError, check=has_words("unit")):
        fill(pynvml.c_metricInfo_t(), {"unit": 4096}, Handles(), keep)


def test_what_a_binding_gives_by_names_is_written_and_read() -> None:
    events = [{"eventType": 2, "gpuId": 7}]
    written = to_json(events, Handles())
    assert build(written) == events
    refuse_result("nvmlSystemEventSetWait", written)

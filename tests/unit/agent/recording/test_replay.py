"""A replayed recording gives the same ticks as the recorded machine."""

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
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.host.procfs import Procfs
from gpuledger_agent.recording.format import RecordingHeader, read_recording
from gpuledger_agent.recording.recorder import Recorder, RecordingLibrary, RecordingProcfs
from gpuledger_agent.recording.replay import ReplayClock, ReplayLibrary, ReplayProcfs
from gpuledger_agent.recording.serialize import Handles, from_json, to_json
from gpuledger_agent.sampling import Sampler
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.errors import has_words
from tests.examples import examples
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
        """Sample like the agent, after each wait."""
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


def record(
    node: Node, file: Path, waits: list[float], *, sampling_interval_seconds: float
) -> list[NodeTick]:
    header = RecordingHeader(
        time_ns=node.clock.time_ns(),
        monotonic_ns=node.clock.monotonic_ns(),
        boottime_ns=node.clock.boottime_ns(),
        sampling_interval_seconds=sampling_interval_seconds,
        is_simulated=True,
        is_redacted=False,
    )
    recorder = Recorder(file, header, node.clock)
    recording = Node(
        RecordingLibrary(node.nvml, recorder),
        RecordingProcfs(node.procfs, recorder),
        node.clock,
        node.hand,
    )
    ticks = recording.ticks(waits)
    recorder.close()
    return ticks


def played(file: Path) -> Node:
    header, lines = read_recording(file)
    hand = ManualClock(start_ns=LATER_NS)
    clock = ReplayClock(header, hand)
    library = ReplayLibrary(header, lines, clock)
    return Node(library, ReplayProcfs(header, lines, clock), clock, hand)


def encoded(ticks: list[NodeTick], *, moved_ns: int = 0) -> list[bytes]:
    """Return the ticks in encoded form, with times moved back by `moved_ns`."""
    published: list[NodeSample | ProcessRecord] = []
    for tick in ticks:
        published += [tick.sample, *tick.processes]
    return [encode(replace(one, time_ns=one.time_ns - moved_ns)) for one in published]


@given(
    name=st.sampled_from(["gpu-node-1", "gpu-node-2"]),
    waits=st.lists(st.sampled_from([0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=6),
)
@settings(examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_replayed_recording_gives_the_ticks_of_the_recorded_machine(
    tmp_path: Path, name: str, waits: list[float]
) -> None:
    file = tmp_path / "recording.jsonl"
    recorded = record(simulated(name), file, waits, sampling_interval_seconds=0.25)
    node = played(file)
    again = node.ticks(waits)
    assert len(recorded) == len(waits)
    assert any(gpu.utilization_ratio for gpu in recorded[-1].sample.gpus)
    moved_ns = node.clock.time_ns() - node.clock.monotonic_ns() - (EPOCH_NS + 7_000_000_000)
    assert encoded(again, moved_ns=moved_ns) == encoded(recorded)


def test_a_compressed_recording_is_read_like_any_other(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    record(simulated("gpu-node-1"), packed, [1.0], sampling_interval_seconds=1)
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert packed.stat().st_size < plain.stat().st_size / 4
    assert read_recording(packed) == read_recording(plain)


def test_after_the_end_of_a_recording_its_driver_is_unavailable(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    record(simulated("gpu-node-1"), file, [1.0, 1.0], sampling_interval_seconds=1)
    node = played(file)
    node.ticks([1.0, 1.0])
    node.hand.advance(2)
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        node.nvml.nvmlDeviceGetCount()


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a recording in which all lines except the header are changed."""
    header, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    changed = file.with_name("changed.jsonl")
    changed.write_text("\n".join(map(json.dumps, [header, *lines])))
    return changed


@pytest.mark.parametrize("sampling_interval_seconds", [0, -1])
def test_a_recording_with_an_invalid_sampling_interval_is_rejected(
    tmp_path: Path, sampling_interval_seconds: float
) -> None:
    file = tmp_path / "recording.jsonl"
    record(
        simulated("gpu-node-1"), file, [1.0], sampling_interval_seconds=sampling_interval_seconds
    )

    with pytest.raises(UserError, check=has_words("line 1", "sampling_interval_seconds")):
        read_recording(file)


def test_text_that_the_driver_garbles_is_garbled_again(tmp_path: Path) -> None:
    node = simulated("gpu-node-1")
    file = tmp_path / "recording.jsonl"
    record(node, file, [1.0], sampling_interval_seconds=1)

    def garble(line: dict[str, Any]) -> None:
        if line.get("call") == "nvmlDeviceGetName":
            del line["result"]
            line["failure"] = "not_text"

    ticks = played(rewritten(file, garble)).ticks([1.0])
    assert {gpu.model for gpu in ticks[0].sample.gpus} == {None}


@pytest.mark.parametrize(
    "value",
    [
        7,
        float("inf"),
        b"text",
        b"\xff\x01",
        (1, [b"a", None]),
        [{"eventType": 2, "gpuId": 7}],
    ],
)
def test_a_value_is_written_and_read(value: object) -> None:
    assert again(value) == value


def test_the_bytes_and_unions_of_a_struct_are_written_and_read() -> None:
    platform = pynvml.c_nvmlPlatformInfo_v2_t()
    platform.ibGuid, platform.trayIndex = b"\xff\x01", b"\xc8"
    field = pynvml.c_nvmlFieldValue_t()
    field.value.ullVal = 2**64 - 1
    for struct in (platform, field):
        assert bytes(again(struct)) == bytes(struct)


def again(value: object) -> Any:  # noqa: ANN401  # a struct of the library
    written = json.loads(json.dumps(to_json(value, Handles())))
    return from_json(written, Handles(), lambda _name, number: number)

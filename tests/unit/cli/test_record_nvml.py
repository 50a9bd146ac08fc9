"""The recording command: a file that the agent can replay, or one line with the cause."""

import contextlib
import subprocess
import sys
import zlib
from pathlib import Path

import pynvml
import pytest

from gpuledger.clock import SystemClock
from gpuledger.errors import UserError
from gpuledger_agent.recording.format import RecordingHeader, read_recording
from gpuledger_agent.recording.recorder import Recorder
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.__main__ import main

QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"


def record(out: Path, *more: str) -> int:
    return main(
        [
            "record-nvml", "--source", f"simulated:{QUICKSTART}", "--node", "gpu-node-1",
            "--for", "1s", "--interval", "0.25s", "--output", str(out), "--no-probes", *more,
        ]
    )  # fmt: skip


def test_a_recording_can_be_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "node.jsonl.gz"
    assert record(out) == 0
    assert f"gpuledger agent --source recorded:{out}" in capsys.readouterr().err
    header, lines = read_recording(out)
    assert header.is_simulated
    assert header.gpus == ["NVIDIA H100 80GB HBM3"] * 2
    assert sum(line.call == "nvmlDeviceGetPowerUsage" for line in lines) >= 4
    played = find_source(AgentSettings(source=f"recorded:{out}"))
    assert len(played.gpus.open()) == 2


def test_a_redacted_file_contains_none_of_the_nodes_uuids(tmp_path: Path) -> None:
    out = tmp_path / "node.jsonl"
    assert record(out, "--redact") == 0
    text = out.read_text()
    assert "GPU-00000000-0000-4000-8000-" in text
    assert '"is_redacted":true' in text
    assert "finetune" not in text


@pytest.mark.parametrize("name", ["node.jsonl", "node.jsonl.gz"])
def test_a_full_disk_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / name
    out.symlink_to("/dev/full")
    assert record(out) == 2
    message = capsys.readouterr().err.splitlines()
    assert [line for line in message if "recording: " not in line] == [
        f"gpuledger: cannot write {out}: No space left on device; give another --output"
    ]


@pytest.mark.parametrize("seconds", ["600s", "1s"], ids=["while it records", "while it probes"])
def test_sigterm_ends_a_recording_that_can_be_played(tmp_path: Path, seconds: str) -> None:
    out = tmp_path / "node.jsonl.gz"
    recording = subprocess.Popen(
        [
            sys.executable, "-m", "gpuledger_cli", "record-nvml",
            "--source", f"simulated:{QUICKSTART}",
            "--node", "gpu-node-1", "--for", seconds, "--interval", "0.25s", "--output", str(out),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with recording:
        assert recording.stderr
        message = iter(recording.stderr)
        while not out.exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                recording.wait(0.05)
            assert recording.returncode is None
        if seconds == "1s":
            assert any(line.startswith("probing GPU 0") for line in message)
        recording.terminate()
        assert "play it with" in "".join(message)
    assert recording.returncode == 0
    header, _ = read_recording(out)
    assert header.gpus


def scenario_of(tmp_path: Path, *names: str) -> Path:
    file = tmp_path / "scenario.yaml"
    nodes = "".join(f"  - {{name: {name}, gpus: {{model: NVIDIA L4}}}}\n" for name in names)
    file.write_text(f"name: small\nnodes:\n{nodes}")
    return file


def record_played(tmp_path: Path, scenario: Path) -> int:
    return main(
        [
            "record-nvml", "--source", f"simulated:{scenario}", "--for", "1s", "--interval",
            "0.25s", "--no-probes", "--output", str(tmp_path / "out.jsonl"),
        ]
    )  # fmt: skip


def test_the_only_node_of_a_scenario_needs_no_name(tmp_path: Path) -> None:
    assert record_played(tmp_path, scenario_of(tmp_path, "gpu-a")) == 0


def test_a_scenario_with_several_nodes_requires_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert record_played(tmp_path, scenario_of(tmp_path, "gpu-a", "gpu-b")) == 2
    assert "give --node, one of gpu-a, gpu-b" in capsys.readouterr().err


def test_records_from_before_a_call_hangs_are_in_the_file(tmp_path: Path) -> None:
    out = tmp_path / "node.jsonl.gz"
    header = RecordingHeader(
        time_ns=1,
        monotonic_ns=1,
        boottime_ns=1,
        sampling_interval_seconds=1,
        is_simulated=True,
        is_redacted=False,
    )
    with contextlib.closing(Recorder(out, header, SystemClock())) as recorder:
        recorder.put(1, call="nvmlInit")
        recorder.flush()
        written = zlib.decompressobj(wbits=31).decompress(out.read_bytes())
    assert written.count(b"\n") == 2


def test_sigterm_ends_a_recording_though_a_probe_hangs(tmp_path: Path) -> None:
    out, scenario = tmp_path / "node.jsonl.gz", scenario_of(tmp_path, "gpu-a")
    hang = "{node: gpu-a, kind: hang, calls: [nvmlDeviceGetPersistenceMode]}"
    scenario.write_text(f"{scenario.read_text()}faults: [{hang}]\n")
    recording = subprocess.Popen(
        [
            sys.executable, "-m", "gpuledger_cli", "record-nvml",
            "--source", f"simulated:{scenario}",
            "--for", "1s", "--interval", "0.25s", "--output", str(out),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    with recording:
        assert recording.stderr
        message = iter(recording.stderr)
        assert any(line.startswith("probing GPU 0") for line in message)
        recording.terminate()
        assert "play it with" in "".join(message)
    assert recording.returncode == 0
    _, lines = read_recording(out)
    assert sum(line.call == "nvmlDeviceGetPowerUsage" for line in lines) >= 3


def test_a_machine_without_nvml_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert main(["record-nvml", "--output", str(tmp_path / "x")]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert "NVML does not answer on this machine" in message
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has NVML")


OTHER = (
    b'{"format":"other","time_ns":1,"monotonic_ns":1,"boottime_ns":1,"sampling_interval_seconds":1,'
    b'"is_simulated":true,"is_redacted":false}\n'
)
OWN = OTHER.replace(b"other", b"gpuledger-nvml-recording")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "line 1: invalid line of a recording"),
        (b"{}\n", "line 1: invalid line of a recording"),
        (OWN + b'{"call": 1}', "line 2: invalid line of a recording"),
        (OWN + b'{"call": "\xff"}', "line 2: invalid line of a recording"),
        (OWN + b'{"result": ' + b"[" * 10_000, "line 2: invalid line of a recording"),
        (OTHER, "expected format gpuledger-nvml-recording"),
    ],
)
def test_a_file_that_is_not_a_recording_is_named(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        find_source(AgentSettings(source=f"recorded:{file}"))

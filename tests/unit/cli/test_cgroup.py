"""`gpuledger cgroup`: how the agent interprets a cgroup line."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gpuledger_cli.__main__ import main

DATA = Path(__file__).parents[2] / "data"
VECTORS = [json.loads(line) for line in (DATA / "cgroup-vectors.jsonl").read_text().splitlines()]
ID = "a" * 64
UID = "9953f715-6c55-3eb2-99f1-cc88e6816fce"
LINE = f"0::/kubepods/pod{UID}/{ID}"


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_line_of_standard_input_becomes_one_object_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "\n".join(vector["line"] for vector in VECTORS)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines + "\n\n"))
    assert main(["cgroup", "--format", "json"]) == 0
    keys = ("line", "pod_uid", "container_id", "job_id")
    assert objects(capsys.readouterr().out) == [
        {key: vector.get(key) for key in keys} for vector in VECTORS
    ]


def test_a_file_is_read_as_the_agent_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cgroup"
    file.write_text(f"3:memory:/docker/{ID}\n{LINE}\n")
    assert main(["cgroup", str(file), "0::/", "--format=json"]) == 0
    assert objects(capsys.readouterr().out) == [
        {"line": LINE, "pod_uid": UID, "container_id": ID, "job_id": None},
        {"line": "0::/", "pod_uid": None, "container_id": None, "job_id": None},
    ]


def test_a_table_names_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cgroup", LINE]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "POD UID"
    assert row.split() == [UID, ID, "-", LINE]


@pytest.mark.parametrize("path", ["/proc/nobody/cgroup", "{folder}/nothing", "{folder}/locked"])
def test_an_unreadable_file_gives_one_line_and_exit_code_2(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locked").symlink_to(tmp_path / "locked")
    assert main(["cgroup", LINE, path.format(folder=tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "cannot read" in err


@pytest.mark.parametrize(
    "arguments", [["cgroup", "--format", "xml", LINE], ["cgroup", "--bogus"], ["nonsense"]]
)
def test_a_mistyped_command_gives_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

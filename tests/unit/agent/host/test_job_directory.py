"""Which jobs have which GPUs, from a directory that a scheduler writes, whatever it contains."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.codec import validate
from gpuledger.errors import UserError
from gpuledger.records import MigInstance
from gpuledger.records.bounds import MAX_JOB_ALLOCATIONS, MAX_JOB_ID_LENGTH
from gpuledger.runtime import Check
from gpuledger_agent.host.job_directory import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_JOBS,
    MAX_SCANNED,
    JobDirectory,
    JobFiles,
    ParsedJobFiles,
    job_files_in,
    parse_job_files,
)
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import find_source

CUT = MigInstance(
    uuid="MIG-b", profile="1g.10gb", gpu_instance=7, compute_instance=0, compute_slices=1
)
DEVICES = DeviceIndex(by_index={0: "GPU-a", 1: "GPU-b"}, layouts={"GPU-a": [], "GPU-b": [CUT]})


def parse(contents: Mapping[str, bytes]) -> ParsedJobFiles:
    return parse_job_files(JobFiles(contents), DEVICES)


def held_in(parsed: ParsedJobFiles) -> list[tuple[str, int | None, str]]:
    return [(one.gpu_uuid, one.gpu_instance, one.job_id) for one in parsed.allocations]


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"0": b"4242\n"}, [("GPU-a", None, "4242")]),
        ({"0": b"4242"}, [("GPU-a", None, "4242")]),
        ({"0": b"8\n7\n\n8\n"}, [("GPU-a", None, "7"), ("GPU-a", None, "8")]),
        ({"0": b"  7 \r\n"}, [("GPU-a", None, "7")]),
        ({"1.7": b"7\n", "1": b"8\n"}, [("GPU-b", None, "8"), ("GPU-b", 7, "7")]),
        ({"0": b"", "1": b"\n"}, []),
        (
            {"0": b"1234[5].server.example.org\n4242_7\n"},
            [("GPU-a", None, "1234[5].server.example.org"), ("GPU-a", None, "4242_7")],
        ),
        # Two spellings of one number are one GPU.
        ({"0": b"7\n", "00": b"7\n"}, [("GPU-a", None, "7")]),
    ],
)
def test_a_file_belongs_to_a_gpu_and_each_line_is_a_job(
    contents: Mapping[str, bytes], expected: list[tuple[str, int | None, str]]
) -> None:
    parsed = parse(contents)
    assert held_in(parsed) == expected
    assert parsed.rejected == {}


@pytest.mark.parametrize(
    ("name", "content", "reason", "kept"),
    [
        ("0", b"7\na job\n", "malformed", ["7"]),
        ("0", b'7"} 1\n', "malformed", []),
        ("0", b"../../etc\n", "malformed", []),
        ("0", b"-rf\n", "malformed", []),
        ("0", "\u0664\u0662\n".encode(), "malformed", []),
        ("0", b"\xff\xfe7\x00\n", "malformed", []),
        ("0", b"7" * (MAX_JOB_ID_LENGTH + 1), "malformed", []),
        ("0", b"7" * MAX_JOB_ID_LENGTH, None, ["7" * MAX_JOB_ID_LENGTH]),
        ("0", b"\n".join(b"%d" % job for job in range(MAX_JOBS + 1)), "too_many", None),
        ("9", b"7\n", "unknown_gpu", []),
        ("0.7", b"7\n", "unknown_instance", []),
        ("1.6", b"7\n", "unknown_instance", []),
    ],
)
def test_invalid_entries_are_left_out_with_a_reason(
    name: str, content: bytes, reason: str | None, kept: list[str] | None
) -> None:
    parsed = parse({name: content})
    jobs = [one.job_id for one in parsed.allocations]
    assert jobs == kept if kept is not None else len(jobs) == MAX_JOBS
    assert parsed.rejected == ({} if reason is None else {name: reason})


@given(st.dictionaries(st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,4})?", fullmatch=True), st.binary()))
def test_any_content_gives_records_that_can_be_published(contents: dict[str, bytes]) -> None:
    for one in parse(contents).allocations:
        validate(one)


def directory(folder: Path) -> tuple[JobDirectory, Check]:
    check = Check()
    return JobDirectory(job_files_in(folder), check=check), check


def test_the_directory_is_read_at_each_call(tmp_path: Path) -> None:
    jobs, check = directory(tmp_path)
    file = tmp_path / "0"
    for text in ("7\n", "8\n", "8\n9\n"):
        # With the same length and the same file system time.
        file.write_text(text)
        os.utime(file, ns=(1, 1))
        assert [one.job_id for one in jobs.current(DEVICES)] == text.split()
    file.unlink()
    assert jobs.current(DEVICES) == []
    assert check.is_ok


def test_a_directory_that_does_not_exist_yet_is_not_an_error(tmp_path: Path) -> None:
    jobs, check = directory(tmp_path / "gpu-jobs")
    assert jobs.current(DEVICES) == []
    assert check.is_ok
    (tmp_path / "gpu-jobs").mkdir()
    (tmp_path / "gpu-jobs" / "1").write_text("7\n")
    assert [one.job_id for one in jobs.current(DEVICES)] == ["7"]


def test_unreadable_files_are_skipped_and_the_others_count(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "3").write_bytes(b"7\n" * MAX_FILE_BYTES)
    (tmp_path / "5").symlink_to("5")
    (tmp_path / "1").write_text("7\n")
    files = job_files_in(tmp_path)()
    assert files.contents == {"1": b"7\n"}
    assert files.rejected == dict.fromkeys("235", "unreadable")
    jobs, check = directory(tmp_path)
    assert [one.job_id for one in jobs.current(DEVICES)] == ["7"]
    assert not check.is_ok
    assert "3 files" in check.detail


def test_files_that_are_not_gpus_are_skipped(tmp_path: Path) -> None:
    for name in (".0.tmp", "0~", "gpu0", "0.1.2", "-1", "\u0660", "12345", "sedX7"):
        (tmp_path / name).write_text("7\n")
    assert job_files_in(tmp_path)() == JobFiles({})


def test_a_huge_directory_is_read_up_to_a_limit(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / str(number)).write_text("7\n")
    files = job_files_in(tmp_path)()
    assert len(files.contents) == MAX_FILES
    assert list(files.rejected.values()) == ["too_many"]


def test_files_with_other_names_do_not_count_towards_the_limit(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 1):
        (tmp_path / f"old-{number}.bak").touch()
    for number in range(2):
        (tmp_path / str(number)).write_text("7\n")
    jobs, check = directory(tmp_path)
    assert len(jobs.current(DEVICES)) == 2
    assert check.is_ok
    assert check.detail == "2 job allocations on 2 devices"


def test_a_huge_number_of_names_is_read_up_to_a_limit(tmp_path: Path) -> None:
    for number in range(MAX_SCANNED + 1):
        (tmp_path / f"old-{number}").touch()
    assert list(job_files_in(tmp_path)().rejected.values()) == ["too_many"]


def test_files_with_too_many_allocations_are_named() -> None:
    count = MAX_JOB_ALLOCATIONS // MAX_JOBS
    devices = DeviceIndex(by_index={index: f"GPU-{index:03}" for index in range(count + 2)})
    content = b"\n".join(b"%d" % job for job in range(MAX_JOBS))
    files = JobFiles({str(index): content for index in range(count + 2)})
    parsed = parse_job_files(files, devices)
    assert len(parsed.allocations) == MAX_JOB_ALLOCATIONS
    assert parsed.rejected == dict.fromkeys([str(count), str(count + 1)], "too_many")


def test_a_recording_rejects_the_job_directory_of_this_machine(tmp_path: Path) -> None:
    settings = AgentSettings(source="recorded:x.jsonl", job_mapping_dir=tmp_path)
    with pytest.raises(UserError, match=r"job_mapping_dir: .* remove it"):
        find_source(settings)


def test_a_file_instead_of_the_directory_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    jobs, check = directory(tmp_path / "file")
    assert jobs.current(DEVICES) == []
    assert not check.is_ok

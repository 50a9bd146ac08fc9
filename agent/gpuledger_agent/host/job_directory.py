"""Reads files in which a scheduler such as Slurm lists the jobs to which GPUs are allocated.

The directory has the format of dcgm-exporter's `--hpc-job-mapping-dir`: one file per GPU, named by
the driver's index, or per MIG instance, named `<index>.<GPU instance>`, with one job id per line.
The scheduler's prolog writes the file and the epilog deletes it. Other files, such as temporary
files to be renamed, are ignored.

Programs that can write to the directory can only change to which jobs GPUs are allocated, because
usage is attributed by cgroups. All files are read again in each tick: if a file is written twice
within the resolution of the file system's clock, its time stamp does not show the second change.
The numbers of files, bytes, ids and characters are limited. Unreadable files are counted and fail
the check `job_files`. If a GPU has no file, as between two jobs, it is not allocated to a job.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from gpuledger.records import JobAllocation
from gpuledger.records.bounds import MAX_JOB_ALLOCATIONS, MAX_JOB_ID_LENGTH
from gpuledger.runtime import Check
from gpuledger.small_files import read_small_file
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.metrics import JOB_ALLOCATIONS, JOB_FILES_REJECTED

_log = structlog.get_logger(__name__)

MAX_FILES: Final = 512
"""Maximum number of files: enough for 256 GPUs and MIG instances, each with two files, such as `1`
and `01`."""
MAX_SCANNED: Final = 16_384
"""Maximum number of names read from the directory, including other files."""
MAX_FILE_BYTES: Final = 16 * 1024
MAX_JOBS: Final = 64
"""Maximum number of jobs per file; Slurm can share a GPU among several jobs (`gres/shard`)."""
_FILE_NAME: Final = re.compile(r"(?P<gpu>\d{1,4})(?:\.(?P<instance>\d{1,4}))?", re.ASCII)
# Ids of common schedulers: `4242`, `4242_7`, `1234[5].server.example.org`. The first character
# excludes options and paths.
_JOB_ID: Final = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9._+:@\[\]-]{{0,{MAX_JOB_ID_LENGTH - 1}}}", re.ASCII
)


class JobFiles(NamedTuple):
    """The files in the directory at one time."""

    contents: Mapping[str, bytes]
    """File contents by file name."""
    rejected: Mapping[str, str] = {}
    """Why each file could not be read, by file name; the reason is a label value of the metric."""


ReadJobFiles = Callable[[], JobFiles]
"""Reads the directory; raises OSError if that fails."""


def job_files_in(folder: Path) -> ReadJobFiles:
    """Return a function that reads the files named after GPUs or MIG instances in a directory."""
    return lambda: _read_files(folder)


def _read_files(folder: Path) -> JobFiles:
    contents: dict[str, bytes] = {}
    rejected: dict[str, str] = {}
    with os.scandir(folder) as listed:
        count = 0
        for scanned, item in enumerate(listed):
            is_of_gpu = _FILE_NAME.fullmatch(item.name) is not None
            if scanned >= MAX_SCANNED or (is_of_gpu and count >= MAX_FILES):
                # The order of the listing decides which files are left out, so report this.
                rejected[item.name[:16]] = "too_many"
                break
            if not is_of_gpu:
                continue
            count += 1
            try:
                contents[item.name] = read_small_file(Path(item.path), max_bytes=MAX_FILE_BYTES)
            except FileNotFoundError:
                continue  # the epilog has just deleted it
            except OSError:
                rejected[item.name] = "unreadable"
    return JobFiles(contents, rejected)


class ParsedJobFiles(NamedTuple):
    """The job allocations in the files, and the files that are not fully usable."""

    allocations: list[JobAllocation]
    """Allocations, ordered by GPU, instance and job."""
    rejected: Mapping[str, str]
    """Why each file was rejected in full or in part, by file name."""


def parse_job_files(files: JobFiles, devices: DeviceIndex) -> ParsedJobFiles:
    """Return the devices that the files allocate to jobs, and the rejected files.

    If a line of a file is not a valid job id, the other lines of the file are still used.
    """
    rejected = dict(files.rejected)
    found: dict[tuple[str, int, str], tuple[JobAllocation, str]] = {}
    for name, content in sorted(files.contents.items()):
        match = _FILE_NAME.fullmatch(name)
        jobs, reason = _parse_jobs(content)
        if match is None or not (jobs or reason):
            continue
        if (gpu_uuid := devices.by_index.get(int(match["gpu"]))) is None:
            rejected[name] = "unknown_gpu"
            continue
        instance = None if match["instance"] is None else int(match["instance"])
        if instance is not None and not devices.has_instance(gpu_uuid, instance):
            rejected[name] = "unknown_instance"
            continue
        for job_id in jobs:
            allocation = JobAllocation(gpu_uuid=gpu_uuid, job_id=job_id, gpu_instance=instance)
            found[gpu_uuid, -1 if instance is None else instance, job_id] = allocation, name
        if reason:
            rejected[name] = reason
    ordered = [found[key] for key in sorted(found)]
    rejected |= {name: "too_many" for _, name in ordered[MAX_JOB_ALLOCATIONS:]}
    return ParsedJobFiles([allocation for allocation, _ in ordered[:MAX_JOB_ALLOCATIONS]], rejected)


def _parse_jobs(content: bytes) -> tuple[list[str], str | None]:
    """Return the job ids in a file without duplicates.

    Also return the reason if ids or lines were rejected; `None` if all are valid.
    """
    lines = [line.strip() for line in content.decode("ascii", "replace").split("\n")]
    ids = dict.fromkeys(line for line in lines if line)
    jobs = [line for line in ids if _JOB_ID.fullmatch(line)]
    if len(jobs) > MAX_JOBS:
        return jobs[:MAX_JOBS], "too_many"
    return jobs, "malformed" if len(jobs) < len(ids) else None


class JobDirectory:
    """Reads the devices that a scheduler has allocated to jobs; called in each tick."""

    def __init__(self, read_files: ReadJobFiles, *, check: Check) -> None:
        self._read_files = read_files
        self._check = check
        self._is_missing_logged = False
        self._last: tuple[JobFiles, DeviceIndex, ParsedJobFiles] | None = None

    def current(self, devices: DeviceIndex) -> list[JobAllocation]:
        """Read the directory, and return the job allocations; callers must not change the list.

        The list is empty if the directory does not exist or cannot be read.
        """
        try:
            files = self._read_files()
        except FileNotFoundError:
            # The prolog of the first job creates the directory.
            if not self._is_missing_logged:
                self._is_missing_logged = True
                _log.info("job_directory_not_found")
            self._check.ok("the directory does not exist yet")
            JOB_ALLOCATIONS.set(0)
            return []
        except OSError as error:
            JOB_FILES_REJECTED.labels(reason="unreadable").inc()
            self._check.failed(f"{error.strerror or error}; samples have no job allocations")
            JOB_ALLOCATIONS.set(0)
            return []
        parsed = self._parse(files, devices)
        JOB_ALLOCATIONS.set(len(parsed.allocations))
        for reason in parsed.rejected.values():
            JOB_FILES_REJECTED.labels(reason=reason).inc()
        if parsed.rejected:
            name, reason = min(parsed.rejected.items())
            self._check.failed(f"rejected {len(parsed.rejected)} files, such as {name!r}: {reason}")
        else:
            devices_allocated = {(one.gpu_uuid, one.gpu_instance) for one in parsed.allocations}
            self._check.ok(
                f"{len(parsed.allocations)} job allocations on {len(devices_allocated)} devices"
            )
        return parsed.allocations

    def _parse(self, files: JobFiles, devices: DeviceIndex) -> ParsedJobFiles:
        # Called in each tick, so parse only if the files or the devices have changed.
        if self._last is None or self._last[0] != files or self._last[1] != devices:
            self._last = files, devices, parse_job_files(files, devices)
        return self._last[2]

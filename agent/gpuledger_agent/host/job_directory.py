"""Which jobs a scheduler such as Slurm has given the GPUs to, by the directory that it writes.

The directory is dcgm-exporter's (`--hpc-job-mapping-dir`): a file for each GPU, called by the
driver's index, or for a MIG instance by `<index>.<GPU instance>`, with the id of a job on each
line. The scheduler's prolog writes it and the epilog takes it away. Anything else in it, such as a
file that is about to be renamed, is passed over.

Whoever may write there says who holds GPUs, and nothing else: what is used goes by cgroups. All of
it is read anew for each tick, so that no change is missed: a file written twice within the file
system's clock looks the same. What is read is bounded, whatever lies there: in files, bytes, ids
and their characters. Files that cannot be read are counted and are a condition of the check
`job_files`; a file that is gone, as between two jobs, says that nobody holds the GPU.
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
"""A file for each of 256 GPUs and instances, written in two ways each."""
MAX_SCANNED: Final = 16_384
"""Names in the directory, whatever they are of."""
MAX_FILE_BYTES: Final = 16 * 1024
MAX_JOBS: Final = 64
"""Jobs of one file: Slurm shares a GPU among some (`gres/shard`)."""
_FILE_NAME: Final = re.compile(r"(?P<gpu>\d{1,4})(?:\.(?P<instance>\d{1,4}))?", re.ASCII)
# What schedulers' ids are made of: `4242`, `4242_7`, `1234[5].server.example.org`. The first one
# keeps options and paths out, the rest whatever a label or a shell would have to quote.
_JOB_ID: Final = re.compile(
    rf"[A-Za-z0-9][A-Za-z0-9._+:@\[\]-]{{0,{MAX_JOB_ID_LENGTH - 1}}}", re.ASCII
)


class JobFiles(NamedTuple):
    """What lay in the directory at one time."""

    contents: Mapping[str, bytes]
    """The contents by the file's name."""
    rejected: Mapping[str, str] = {}
    """The files that could not be read, with the reason, as the metric's label has it."""


ReadJobFiles = Callable[[], JobFiles]
"""Reads the directory; raises OSError where it cannot."""


def job_files_in(folder: Path) -> ReadJobFiles:
    """Return what reads the files of a directory that are called as those of GPUs are."""
    return lambda: _read_files(folder)


def _read_files(folder: Path) -> JobFiles:
    contents: dict[str, bytes] = {}
    rejected: dict[str, str] = {}
    with os.scandir(folder) as listed:
        count = 0
        for scanned, item in enumerate(listed):
            is_of_gpu = _FILE_NAME.fullmatch(item.name) is not None
            if scanned >= MAX_SCANNED or (is_of_gpu and count >= MAX_FILES):
                # Which of them are left out is chance: whoever put them there is told.
                rejected[item.name[:16]] = "too_many"
                break
            if not is_of_gpu:
                continue
            count += 1
            try:
                contents[item.name] = read_small_file(Path(item.path), max_bytes=MAX_FILE_BYTES)
            except FileNotFoundError:
                continue  # the epilog has just taken it away
            except OSError:
                rejected[item.name] = "unreadable"
    return JobFiles(contents, rejected)


class ParsedJobFiles(NamedTuple):
    """What the files say."""

    allocations: list[JobAllocation]
    """By GPU, instance and job."""
    rejected: Mapping[str, str]
    """The files of which something could not be used, with the reason."""


def parse_job_files(files: JobFiles, devices: DeviceIndex) -> ParsedJobFiles:
    """Return which jobs hold which devices. Pure.

    Of a file with a line that is no id the other lines count.
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
    """Return the jobs of a file, each once, and why some are left out."""
    lines = [line.strip() for line in content.decode("ascii", "replace").split("\n")]
    ids = dict.fromkeys(line for line in lines if line)
    jobs = [line for line in ids if _JOB_ID.fullmatch(line)]
    if len(jobs) > MAX_JOBS:
        return jobs[:MAX_JOBS], "too_many"
    return jobs, "malformed" if len(jobs) < len(ids) else None


class JobDirectory:
    """The jobs that hold devices, read for each tick."""

    def __init__(self, read_files: ReadJobFiles, *, check: Check) -> None:
        self._read_files = read_files
        self._check = check
        self._is_missing_logged = False
        self._last: tuple[JobFiles, DeviceIndex, ParsedJobFiles] | None = None

    def current(self, devices: DeviceIndex) -> list[JobAllocation]:
        """Return which jobs hold which devices now; the list is not to be changed.

        None where the directory is not there.
        """
        try:
            files = self._read_files()
        except FileNotFoundError:
            # The prolog of the first job makes it: until then nobody holds anything.
            if not self._is_missing_logged:
                self._is_missing_logged = True
                _log.info("job_directory_not_found")
            self._check.ok("there is no directory yet")
            JOB_ALLOCATIONS.set(0)
            return []
        except OSError as error:
            JOB_FILES_REJECTED.labels(reason="unreadable").inc()
            self._check.failed(f"{error.strerror or error}; ticks have no jobs that hold GPUs")
            JOB_ALLOCATIONS.set(0)
            return []
        parsed = self._parse(files, devices)
        JOB_ALLOCATIONS.set(len(parsed.allocations))
        for reason in parsed.rejected.values():
            JOB_FILES_REJECTED.labels(reason=reason).inc()
        if parsed.rejected:
            name, reason = min(parsed.rejected.items())
            self._check.failed(f"{len(parsed.rejected)} files, such as {name!r}: {reason}")
        else:
            devices_allocated = {(one.gpu_uuid, one.gpu_instance) for one in parsed.allocations}
            self._check.ok(
                f"{len(parsed.allocations)} holdings by jobs, of {len(devices_allocated)} devices"
            )
        return parsed.allocations

    def _parse(self, files: JobFiles, devices: DeviceIndex) -> ParsedJobFiles:
        # Parsed anew only where the files or the devices changed: it is asked for each tick.
        if self._last is None or self._last[0] != files or self._last[1] != devices:
            self._last = files, devices, parse_job_files(files, devices)
        return self._last[2]

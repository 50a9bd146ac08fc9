"""Reads the jobs that request GPUs from the output of Slurm's `sacct`, as rows for `waits`.

A job waits from the time at which it is eligible until it starts or is cancelled. `sacct` lists no
job that is held, depends on another job, or exceeds the limit of its array.

`sacct` lists a pending array with all its tasks, also those that have started. These have lines of
their own, unless they ended before the time at which the file begins.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import orjson

from gpuledger.errors import ArgumentError
from gpuledger.texts import shorten
from gpuledger_reports.capacity.pod_shapes import GPU, MIG_PROFILE
from gpuledger_reports.capacity.report import Option

Job = dict[str, str | int | None]
"""A row for `waits`. Times are in seconds since 1970."""
_COLUMNS: Final = (
    "Cluster,JobID,JobName,Account,Partition,QOS,Eligible,Start,End,Reason,ReqTRES,NodeList"
)
_ARRAY: Final = re.compile(r"(\d+)_\[([^]%]+)(?:%\d+)?\]")
_TASKS: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?")
_GRES: Final = re.compile(r"gres/(gpu|shard|mps)(?::([^=,]+))?=(\d+)")
_AMOUNT_DIGITS: Final = 9
_SECONDS: Final = re.compile(r"[0-9]{1,11}")
_HOSTS: Final = re.compile(r"\[(\d+)[^]]*\]")
_MAX_JOBS: Final = 400_000
"""Jobs and tasks in a file. With so many, a report needs 1 GB of memory, by team 2 GB."""


def read_slurm_jobs(text: str, name: str) -> list[Job]:
    """Return the jobs in a file, given the path and the option's name."""
    try:
        with Path(text).open(encoding="utf-8-sig", errors="replace") as file:
            return parse_sacct(file, name)
    except OSError as error:
        raise ArgumentError(name, f"cannot read {text}: {error.strerror}") from error


SLURM_JOBS: Final = Option(
    help="File with Slurm jobs, which count as pods: the output of sacct, written after the end of"
    " the time range.",
    parse=read_slurm_jobs,
    is_file=True,
)


def parse_sacct(lines: Iterable[str], name: str) -> list[Job]:
    """Return each job and each task of an array once. Raises `ArgumentError`."""
    numbered = enumerate(lines, start=1)
    header = next(numbered, (1, ""))[1].rstrip("\n")
    # With `--delimiter`, it is not `|`.
    delimiter = re.sub(r"^\w*(\W*).*", r"\1", header) or "|"
    columns = header.split(delimiter)
    if missing := [column for column in _COLUMNS.split(",") if column not in columns]:
        raise ArgumentError(
            name,
            f"line 1 lacks {', '.join(missing)}; run `sacct --parsable2 --format={_COLUMNS}`",
        )
    requests: set[str | None] = set()
    found: dict[tuple[str, str], Job] = {}
    pending: dict[tuple[str, str], Job] = {}
    for number, line in numbered:
        try:
            row = _row(line, columns, delimiter)
            requested = _requested(row["ReqTRES"])
            requests.add(requested)
            job = _job(row, requested)
            room = _MAX_JOBS - len(found) - len(pending)
            ids = _ids(row["JobID"], room) if job else []
        except ValueError as error:
            raise ArgumentError(name, f"line {number}: {error}") from error
        # A task's own line replaces the task in the line of the array.
        jobs = found if ids == [row["JobID"]] else pending
        jobs |= {(row["Cluster"], each): {**job, "pod_uid": each} for each in ids}
    if requests == {None}:
        raise ArgumentError(
            name, "no job requests GPUs; add gres/gpu to AccountingStorageTRES in slurm.conf"
        )
    return [*(pending | found).values()]


def _row(line: str, columns: Sequence[str], delimiter: str) -> dict[str, str]:
    fields = line.rstrip("\n").split(delimiter)
    if len(fields) != len(columns):
        raise ValueError(
            f"{len(fields)} fields instead of {len(columns)}; if a job's name contains"
            f" {delimiter!r}, give `sacct` another --delimiter"
        )
    return dict(zip(columns, fields, strict=True))


def _job(row: Mapping[str, str], requested: str | None) -> Job:
    """Return a job without its id; empty if it requests no GPUs, was not eligible, or is a step."""
    times = {name: _seconds(name, row[name]) for name in ("Eligible", "Start", "End")}
    # Steps have no partition.
    if not (requested and row["Partition"] and times["Eligible"]):
        return {}
    has_nodes = row["NodeList"] not in {"", "None assigned"}
    return {
        "cluster": row["Cluster"],
        # The first node, such as n1 of n[1-4].
        "node": _HOSTS.sub(r"\1", row["NodeList"]).partition(",")[0] if has_nodes else None,
        "job_name": row["JobName"],
        "account": row["Account"] or None,
        "priority_class": row["QOS"] or None,
        "queue": row["Partition"],
        "reason": None if row["Reason"] in {"", "None"} else row["Reason"],
        "requested": requested,
        "created": times["Eligible"],
        # A cancelled job may have the time at which it was cancelled as its start.
        "scheduled": times["Start"] if has_nodes else None,
        "given_up": None if has_nodes else times["End"],
    }


def _seconds(name: str, text: str) -> int | None:
    if text in {"", "None", "Unknown"}:
        return None
    if not _SECONDS.fullmatch(text):
        raise ValueError(f"{name} is {shorten(text, 40)!r}; set SLURM_TIME_FORMAT=%s for `sacct`")
    return int(text)


def _ids(job_id: str, room: int) -> list[str]:
    """Return the ids of all tasks of a pending array, such as `7_[1-5:2,9%3]`; else the id.

    Raises `ValueError` if there are more than `room`.
    """
    array = _ARRAY.fullmatch(job_id)
    # `sacct` shortens long lists of tasks.
    parts = array[2].split(",") if array else [""] if {"[", "]"} & {*job_id} else []
    ranges = []
    for part in parts:
        tasks = _TASKS.fullmatch(part)
        if tasks is None:
            problem = f"cannot read the tasks of {shorten(job_id, 80)}"
            raise ValueError(f"{problem}; set SLURM_BITSTR_LEN=0 for `sacct`")
        first, last, step = tasks.groups()
        ranges.append(range(int(first), int(last or first) + 1, int(step or 1)))
    if (sum(map(len, ranges)) if array else 1) > room:
        raise ValueError(
            f"more than {_MAX_JOBS:,} jobs and tasks request GPUs; run `sacct` for a shorter time"
            " range or for fewer partitions"
        )
    return [f"{array[1]}_{task}" for task in chain(*ranges)] if array else [job_id]


def _requested(tres: str) -> str | None:
    """Return the requested GPUs as in the column `requested` of pods; `None` without GPUs."""
    amounts = Counter[str]()
    total = of_types = instances = 0
    for kind, of_type, text in _GRES.findall(tres):
        if len(text) > _AMOUNT_DIGITS:
            raise ValueError(f"cannot read the GPUs in {shorten(tres, 80)!r}; run `sacct` again")
        profile = MIG_PROFILE.search(of_type)
        if kind != "gpu":
            amounts[f"gres/{kind}"] += int(text)
        elif profile:
            amounts[f"nvidia.com/mig-{profile[0]}"] += int(text)
            instances += int(text)
        elif of_type:
            of_types += int(text)
        else:
            total = int(text)
    # The total includes all types and MIG instances; Slurm may have recorded only the types.
    amounts[GPU] = max(total - instances, of_types)
    requested = {name: str(amount) for name, amount in amounts.items() if amount}
    return orjson.dumps(requested).decode() if requested else None

"""Jobs that wait in Slurm, from the output of `sacct`."""

import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.errors import ArgumentError
from gpuledger.store.views import create_views
from gpuledger_reports.capacity.demand import read_waiting
from gpuledger_reports.capacity.queue import REPORT
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.capacity.slurm_jobs import Job, parse_sacct, read_slurm_jobs
from gpuledger_reports.pricing.policy import BillPolicy, TeamRow
from gpuledger_reports.reading.times import Window
from tests.tables import for_each
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_US,
    inventory_row,
    node_row,
    pending_row,
    pod_row,
    write_store,
)

BEGIN = BEGIN_US // 10**6
WINDOW = Window(BEGIN_US, BEGIN_US + 10 * HOUR_US)
GPU = '{"nvidia.com/gpu":"1"}'
# Single lines of Slurm 22.05 with slurmdbd, with ids edited so that each is unique. Task 0 of array
# 3 had started, but is also in the line of the array.
RECORDED = """\
Cluster|JobID|JobName|Account|Partition|QOS|Submit|Eligible|Start|End|State|Reason|ReqTRES|NodeList
tests|1|first|root|gpu|normal|1796049634|1796049634|1796049636|1796049642|COMPLETED|None|\
billing=1,cpu=1,gres/gpu:h100=2,gres/gpu=2,mem=500M,node=1|vm
tests|2_3|arr|root|gpu|normal|1796049704|1796049711|1796049711|1796049716|COMPLETED|\
JobArrayTaskLimit|billing=1,cpu=1,gres/gpu=1,mem=500M,node=1|vm
tests|3_0|arr2|root|gpu|normal|1796049704|1796049706|1796049722|Unknown|RUNNING|None|\
billing=1,cpu=1,gres/gpu=1,mem=500M,node=1|vm
tests|3_[0-3]|arr2|root|gpu|normal|1796049704|1796049706|Unknown|Unknown|PENDING|None|\
billing=1,cpu=1,gres/gpu=1,mem=500M,node=1|None assigned
tests|6|cpu|root|gpu|normal|1796049635|1796049635|1796049646|Unknown|RUNNING|None|\
billing=1,cpu=1,mem=500M,node=1|vm
tests|7+1|het|root|gpu|normal|1796049705|1796049705|Unknown|Unknown|PENDING|None|\
billing=1,cpu=1,gres/gpu=1,mem=500M,node=1|None assigned
tests|8|cancelled|root|gpu|normal|1796049635|1796049635|1796049638|1796049638|CANCELLED by 0|None|\
billing=1,cpu=1,gres/gpu=2,mem=500M,node=1|None assigned
"""
COLUMNS = "Cluster,JobID,JobName,Account,Partition,QOS,Eligible,Start,End,Reason,ReqTRES,NodeList"


def sacct(*jobs: dict[str, str | int], delimiter: str = "|") -> list[str]:
    """Return the output of `sacct`; by default, a job that waits for a GPU from hour 1 on."""
    usual = {
        "Cluster": "prod",
        "JobName": "train",
        "Account": "physics",
        "Partition": "gpu",
        "QOS": "normal",
        "Eligible": BEGIN + 3600,
        "Start": "Unknown",
        "End": "Unknown",
        "Reason": "None",
        "ReqTRES": "cpu=1,gres/gpu=1,node=1",
        "NodeList": "None assigned",
    }
    rows = [
        {**usual, "JobID": str(number), **each} for number, each in enumerate(jobs or [{}], start=1)
    ]
    names = [*rows[0]]
    return [delimiter.join(map(str, line)) + "\n" for line in (names, *(r.values() for r in rows))]


def empty_store(folder: Path) -> str:
    """Return a store without pods and use."""
    return write_store(folder, nodes=[node_row()])


def queue(
    store: str, jobs: Sequence[Job] = (), *, by: str = "shape", policy: BillPolicy | None = None
) -> Answer:
    with duckdb.connect() as connection:
        create_views(connection, store)
        policy, options = policy or BillPolicy(prices=[]), {"history": None, "slurm_jobs": jobs}
        question = Question(window=WINDOW, by=(by,), policy=policy, options=options)
        return REPORT.read(connection, question)


def test_each_recorded_job_and_task_with_gpus_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "sacct.txt"
    file.write_text(RECORDED)
    jobs = {str(job["pod_uid"]): job for job in read_slurm_jobs(str(file), "slurm_jobs")}
    assert jobs["1"] == {
        "cluster": "tests",
        "pod_uid": "1",
        "node": "vm",
        "job_name": "first",
        "account": "root",
        "priority_class": "normal",
        "queue": "gpu",
        "reason": None,
        "requested": '{"nvidia.com/gpu":"2"}',
        "created": 1796049634,
        "scheduled": 1796049636,
        "given_up": None,
    }
    assert jobs["2_3"]["reason"] == "JobArrayTaskLimit"
    assert {name: (job["scheduled"], job["given_up"]) for name, job in jobs.items()} == {
        "1": (1796049636, None),
        "2_3": (1796049711, None),
        "3_0": (1796049722, None),
        **dict.fromkeys(("3_1", "3_2", "3_3", "7+1"), (None, None)),
        "8": (None, 1796049638),
    }


@for_each(
    "tres, requested",
    [
        ("gres/gpu=8", '{"nvidia.com/gpu":"8"}'),
        ("gres/gpu=8,gres/gpu:h100=8", '{"nvidia.com/gpu":"8"}'),
        ("gres/gpu:a100=1,gres/gpu:h100=2", '{"nvidia.com/gpu":"3"}'),
        ("gres/gpu:a100=1,gres/gpu=3", '{"nvidia.com/gpu":"3"}'),
        ("gres/gpu:a100_1g.5gb=2,gres/gpu=2", '{"nvidia.com/mig-1g.5gb":"2"}'),
        ("gres/gpu:1g.5gb=2", '{"nvidia.com/mig-1g.5gb":"2"}'),
        (
            "gres/gpu:1g.5gb=2,gres/gpu=3",
            '{"nvidia.com/mig-1g.5gb":"2","nvidia.com/gpu":"1"}',
        ),
        ("gres/shard=4", '{"gres/shard":"4"}'),
        ("gres/mps=50", '{"gres/mps":"50"}'),
        ("gres/gpu=8,gres/mps=50", '{"gres/mps":"50","nvidia.com/gpu":"8"}'),
        ("gres/gpu=2,gres/shard=4", '{"gres/shard":"4","nvidia.com/gpu":"2"}'),
        ("gres/gpu=0", None),
        ("gres/gpumem=10G", None),
    ],
)
def test_gpus_of_types_are_part_of_all_gpus(tres: str, requested: str | None) -> None:
    lines = sacct({"ReqTRES": "gres/gpu=5"}, {"ReqTRES": f"billing=1,{tres},node=1"})
    assert [job["requested"] for job in parse_sacct(lines, "")][1:] == [requested] * bool(requested)


@for_each(
    "job_id, tasks",
    [
        ("7_[3]", ["7_3"]),
        ("7_[1-3%2]", ["7_1", "7_2", "7_3"]),
        ("7_[0-96:32,100,102-103]", ["7_0", "7_32", "7_64", "7_96", "7_100", "7_102", "7_103"]),
        ("7_[0-900000:300000]", ["7_0", "7_300000", "7_600000", "7_900000"]),
        ("7+1", ["7+1"]),
    ],
)
def test_each_pending_task_of_an_array_is_a_job(job_id: str, tasks: list[str]) -> None:
    assert [job["pod_uid"] for job in parse_sacct(sacct({"JobID": job_id}), "")] == tasks


def test_a_line_of_its_own_replaces_the_task_in_the_line_of_the_array() -> None:
    own: dict[str, str | int] = {"JobID": "7_2", "Start": BEGIN + 7200, "NodeList": "n[01-03],m4"}
    array: dict[str, str | int] = {"JobID": "7_[1-2]"}
    for lines in (sacct(own, array), sacct(array, own)):
        jobs = {job["pod_uid"]: job for job in parse_sacct(lines, "")}
        assert {name: job["scheduled"] for name, job in jobs.items()} == {
            "7_1": None,
            "7_2": BEGIN + 7200,
        }
        assert jobs["7_2"]["node"] == "n01"


def test_columns_may_be_in_any_order_with_others_and_another_delimiter() -> None:
    lines = [line.rstrip().split("|") for line in sacct({"JobName": "a"})]
    turned = ["\t".join([*reversed(each), each[0]]) + "\t\n" for each in lines]
    assert parse_sacct(turned, "") == parse_sacct(sacct({"JobName": "a"}), "")


@for_each(
    "lines, problem",
    [
        ([], f"line 1 lacks {COLUMNS.replace(',', ', ')}; run `sacct --parsable2 --format="),
        (["JobID|JobName\n"], "line 1 lacks Cluster, Account, "),
        (
            sacct({}, {"JobName": "a|b"}),
            "line 3: 13 fields instead of 12; if a job's name contains '|', give `sacct` another",
        ),
        (
            sacct({"Start": "2026-10-01T10:00:00"}),
            "line 2: Start is '2026-10-01T10:00:00'; set SLURM_TIME_FORMAT=%s for `sacct`",
        ),
        (
            sacct({"JobID": "7_[1,3,...]"}),
            "line 2: cannot read the tasks of 7_[1,3,...]; set SLURM_BITSTR_LEN=0 for `sacct`",
        ),
        *(
            (
                sacct({"JobID": job_id}),
                f"line 2: cannot read the tasks of {job_id[:80]}",
            )
            for job_id in ("7_[1-3]x", "7_[1-3", "7_1-3]", f"7_[{'9' * 5000}]", f"7_[1-{10**9}]")
        ),
        (
            sacct({"ReqTRES": f"gres/gpu={'9' * 5000}"}),
            "line 2: cannot read the GPUs in 'gres/gpu=999",
        ),
        *(
            (
                sacct({}, {"JobID": job_id}),
                "line 3: more than 400,000 jobs and tasks request GPUs; run `sacct` for a shorter",
            )
            for job_id in ("7_[0-99999999]", "7_[1-400000]", "7_[0-299999,300000-599999%9]")
        ),
        (
            sacct({"ReqTRES": "billing=1,cpu=1"}),
            "no job requests GPUs; add gres/gpu to AccountingStorageTRES in slurm.conf",
        ),
    ],
)
def test_output_that_cannot_be_read_is_an_error_that_names_line_and_fix(
    lines: list[str], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"slurm_jobs: {problem}")):
        parse_sacct(lines, "slurm_jobs")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "sacct.txt"
    file.write_text("".join(sacct({})), encoding="utf-8-sig")
    assert read_slurm_jobs(str(file), "") == parse_sacct(sacct({}), "")


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="slurm_jobs: cannot read /no/file: No such file"):
        read_slurm_jobs("/no/file", "slurm_jobs")


def test_neither_an_ineligible_job_nor_a_step_waits() -> None:
    assert not parse_sacct(sacct({"Eligible": "Unknown"}, {"JobID": "1.0", "Partition": ""}), "")


quarters = st.integers(0, 14 * 4).map(lambda quarter: quarter * 900)
ends = st.sampled_from(["placed", "deleted", "waits"])
sizes = st.sampled_from(["gres/gpu=1", "gres/gpu=8", "gres/gpu:1g.5gb=1,gres/gpu=1"])


@given(st.lists(st.tuples(quarters, quarters, ends, sizes), min_size=1))
@settings(max_examples=8)
def test_jobs_have_the_same_waits_as_pods_with_the_same_times(
    waits: list[tuple[int, int, str, str]],
) -> None:
    pending, pods, lines = [], [], []
    for number, (one, other, end, tres) in enumerate(waits):
        created, left = sorted((one, other))
        line: dict[str, str | int] = {"JobID": str(number), "Eligible": BEGIN + created}
        line["ReqTRES"] = f"cpu=1,{tres}"
        requested = str(parse_sacct(sacct({"ReqTRES": tres}), "")[0]["requested"])
        pod = f"p{number}"
        until = None if end == "waits" else left / 3600
        pending.append(pending_row(pod, created=created / 3600, left=until, requested=requested))
        if end == "placed":
            times = {"created_time": BEGIN_US + created * 10**6}
            times["scheduled_time"] = BEGIN_US + left * 10**6
            pods.append(pod_row(pod, **times))
            line |= {"Start": BEGIN + left, "NodeList": "n"}
        if end == "deleted":
            line["End"] = BEGIN + left
        lines.append(line)
    with TemporaryDirectory() as empty, TemporaryDirectory() as folder:
        store = write_store(Path(folder), pending_pods=pending, pods=pods)
        expected = [{**row, "reasons": None} for row in queue(store).rows]
        jobs = parse_sacct(sacct(*lines), "")
        assert queue(empty_store(Path(empty)), jobs).rows == expected


def test_jobs_are_grouped_by_partition_account_qos_and_name(tmp_path: Path) -> None:
    lines = sacct(
        {"Reason": "AssocGrpGRES"},
        {"Partition": "long", "Account": "", "QOS": "high", "JobName": "eval"},
    )
    jobs, store = parse_sacct(lines, ""), empty_store(tmp_path)
    found = {
        by: {row[by] for row in queue(store, jobs, by=by).rows}
        for by in ("queue", "account", "priority", "workload", "namespace", "reason")
    }
    assert found == {
        "queue": {"gpu", "long"},
        "account": {"physics", None},
        "priority": {"normal", "high"},
        "workload": {"SlurmJob/train", "SlurmJob/eval"},
        "namespace": {None},
        "reason": {"AssocGrpGRES", None},
    }
    notes = queue(store, jobs).notes
    assert "Slurm job 1 (1 GPU) has waited the longest: 9h" in notes


def test_each_of_thousands_of_jobs_counts(tmp_path: Path) -> None:
    jobs = parse_sacct(sacct({"JobID": "1_[1-10001]"}, {}), "")
    (row,) = queue(empty_store(tmp_path), jobs).rows
    assert (row["pods"], row["waiting_gpus"]) == (10_002, 10_002)


def test_rules_of_teams_match_the_ids_of_jobs_as_in_bills(tmp_path: Path) -> None:
    teams = [TeamRow(match={"job": "1*"}, team="one")]
    jobs = parse_sacct(sacct({"JobID": "12"}, {"JobID": "2"}), "")
    policy = BillPolicy(prices=[], teams=teams)
    rows = queue(empty_store(tmp_path), jobs, by="team", policy=policy).rows
    assert {row["team"]: row["pods"] for row in rows} == {"one": 1, "__unallocated__": 1}


def test_demand_includes_jobs_at_the_gpus_that_their_partition_got(tmp_path: Path) -> None:
    started: dict[str, str | int] = {"Start": BEGIN + 3600, "Partition": "fast"}
    lines = sacct(
        {**started, "NodeList": "a"},
        {**started, "NodeList": "b[1-2]", "Partition": "slow"},
        {**started, "NodeList": "b1", "Partition": "slow"},
        {"Partition": "fast", "ReqTRES": "gres/gpu=4", "Eligible": BEGIN + 9 * 3600},
        {"Partition": "slow", "Eligible": BEGIN + 9 * 3600},
    )
    models = {"a": "H100", "b1": "L4"}
    inventory = [inventory_row(node, node=node, model=model) for node, model in models.items()]
    nodes = [node_row(node=node) for node in models]
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, inventory=inventory, nodes=nodes))
        jobs = parse_sacct(lines, "")
        found = read_waiting(connection, ("model",), window=WINDOW, jobs=jobs)
    last = BEGIN_US // HOUR_US + 9
    assert found == {("H100",): {last: pytest.approx(4)}, ("L4",): {last: pytest.approx(1)}}

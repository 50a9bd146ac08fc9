"""How often GPUs fail, and the GPU-hours that this costs, as read from a store."""

from collections.abc import Sequence
from pathlib import Path

import duckdb
import orjson
import pytest

from gpuledger.store.views import create_views
from gpuledger_reports.capacity.faults import REPORT
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    Value,
    allocated,
    node_row,
    pod_row,
    write_store,
)

HOURS = 20
WHOLE = (1 << 60) - 1
FIRST = (1 << 30) - 1
"""The first 30 minutes of an hour."""


def incident(hour: float, *, gpu: str = "GPU-a", node: str = "n", **fields: Value) -> Row:
    """Return the row of an XID 48."""
    pods = [{"uid": f"uid-{pod}", "namespace": "ns", "pod": pod} for pod in fields.pop("on", [])]
    return {
        "cluster": "prod",
        "node": node,
        "time": BEGIN_US + round(hour * HOUR_US),
        "boot_id": "b",
        "gpu_uuid": gpu,
        "kind": "xid",
        "xid": 48,
        "severity": "critical",
        "source": "nvml",
        "pods": orjson.dumps(pods).decode(),
        "kafka_partition": 3,
        "kafka_offset": 0,
        **fields,
    }


def faults(
    store: Path,
    incidents: Sequence[Row],
    usage: Sequence[Row],
    *,
    pods: Sequence[Row] = (),
    nodes: Sequence[Row] = (),
    by: tuple[str, ...] = ("model", "node"),
) -> Answer:
    uri = write_store(store, usage_hourly=usage, incidents=incidents, pods=pods, nodes=nodes)
    window = Window(BEGIN_US, BEGIN_US + HOURS * HOUR_US)
    with duckdb.connect() as connection:
        create_views(connection, uri)
        return REPORT.read(connection, Question(window=window, by=by, policy=BillPolicy(prices=[])))


def fleet(nodes: int = 2) -> list[Row]:
    """Return the usage of nodes n0, n1, … with a GPU each."""
    return [
        allocated(hour, "train", gpu=f"GPU-{number}", node=f"n{number}")
        for number in range(nodes)
        for hour in range(HOURS)
    ]


def test_a_node_that_fails_more_often_than_its_model_is_first_and_has_a_note(
    tmp_path: Path,
) -> None:
    incidents = [incident(hour, gpu="GPU-2", node="n2") for hour in range(0, 20, 2)]
    incidents += [incident(5, gpu="GPU-1", node="n1")]
    # Neither a warning nor a state that existed before the agent started is a failure.
    incidents += [
        incident(9, gpu="GPU-0", node="n0", xid=13, severity="info"),
        incident(9, gpu="GPU-0", node="n0", present_at_start=True),
    ]
    found = faults(tmp_path, incidents, fleet(4))
    flaky, other = found.rows
    assert (flaky["model"], flaky["node"], flaky["failures"]) == ("H100", "n2", 10)
    assert flaky["expected_failures"] == pytest.approx(11 / 4)
    assert flaky["p_value"] == pytest.approx((11 * 3 + 1) / 4**11)
    assert flaky["note"].startswith("fails more often than its model: 10 failures, 2.8 expected")
    assert flaky["causes"] == "ecc (10)"
    years = HOURS / 8760
    assert [flaky[name] * years for name in ("rate", "rate_low", "rate_high")] == [
        pytest.approx(expected, rel=1e-3) for expected in (10, 4.795, 18.39)
    ]
    assert (other["node"], other["failures"], other["note"]) == ("n1", 1, None)
    assert "Groups of GPUs without failures or lost time are not shown: 2 of 4." in found.notes


def test_each_cause_of_a_group_is_a_test_of_its_own(tmp_path: Path) -> None:
    """Four failures, all on one of four nodes, have p = 1/256."""
    incidents = [incident(hour, gpu="GPU-0", node="n0") for hour in range(0, 8, 2)]
    by_node = faults(tmp_path / "node", incidents, fleet(4), by=("node",))
    by_cause = faults(tmp_path / "cause", incidents, fleet(4), by=("node", "cause"))
    for row in (*by_node.rows, *by_cause.rows):
        assert row["p_value"] == pytest.approx(1 / 256)
    assert by_node.rows[0]["note"]
    assert by_cause.rows[0]["note"] is None


def test_a_single_failure_or_equal_rates_are_not_notable(tmp_path: Path) -> None:
    incidents = [
        incident(hour, gpu=f"GPU-{number}", node=f"n{number}")
        for number in range(3)
        for hour in range(0, 20, 4)
    ]
    found = faults(tmp_path, incidents, fleet(3))
    assert [row["note"] for row in found.rows] == [None] * 3


def test_a_failed_gpu_that_was_moved_to_another_node_is_not_lost_there(tmp_path: Path) -> None:
    bits = {"allocated_minutes": WHOLE, "used_minutes": 0}
    usage = [
        *(allocated(hour, "train", **bits) for hour in (1, 2)),
        *(allocated(hour, "notebook", node="m", **bits) for hour in range(3, 9)),
        *(allocated(hour, "notebook", cluster="lab", **bits) for hour in range(9, 12)),
    ]
    (row,) = faults(tmp_path, [incident(1)], usage, by=("gpu",)).rows
    assert row["stalled_gpu_hours"] == pytest.approx(119 / 60, abs=1e-3)


def test_gpu_hours_are_lost_while_a_gpu_does_not_respond_and_until_it_is_used_again(
    tmp_path: Path,
) -> None:
    bits = {"allocated_minutes": WHOLE, "used_minutes": WHOLE}
    usage: list[Row] = [
        allocated(0, "train", **bits),
        # Fails after half of the hour, and is used again after half of the next.
        allocated(1, "train", **{**bits, "used_minutes": FIRST}),
        allocated(2, "train", **{**bits, "used_minutes": WHOLE - FIRST}),
        # Another GPU does not respond for two hours, one of them without an allocation.
        allocated(3, "train", gpu="GPU-b", unresponsive_ns=HOUR_NS),
        allocated(4, None, gpu="GPU-b", unresponsive_ns=HOUR_NS),
    ]
    incidents = [
        incident(1.5),
        incident(1.51, xid=154),
        incident(3, gpu="GPU-b", xid=79),
        incident(3, gpu="GPU-b", kind="gpu_lost", xid=None),
    ]
    found = faults(tmp_path, incidents, usage, by=("cause",))
    lost, ecc = found.rows
    # The hours of the other GPU have no bitmaps.
    assert any("may be higher" in note for note in found.notes)
    assert (lost["cause"], lost["failures"]) == ("lost", 1)
    assert (lost["unresponsive_gpu_hours"], lost["stalled_gpu_hours"]) == (2, 0)
    assert (ecc["cause"], ecc["failures"]) == ("ecc", 1)
    # From the minute after the failure on.
    assert ecc["lost_gpu_hours"] == ecc["stalled_gpu_hours"] == pytest.approx(59 / 60, abs=1e-3)
    assert ecc["gpus"] == lost["gpus"] == pytest.approx(5 / HOURS)


def test_time_without_a_response_does_not_end_the_stall_after_a_failure(tmp_path: Path) -> None:
    """A GPU is silent for ten minutes after XID 79, then unused for almost eight hours."""
    silent, responding = (1 << 10) - 1, {"allocated_minutes": WHOLE, "used_minutes": 0}
    usage: list[Row] = [
        allocated(
            0,
            "train",
            **{**responding, "allocated_minutes": WHOLE - silent},
            unresponsive_ns=HOUR_NS // 6,
        ),
        *(allocated(hour, "train", **responding) for hour in range(1, 8)),
        # Released.
        allocated(8, None, **responding),
        allocated(9, "next", **responding),
    ]
    (row,) = faults(tmp_path, [incident(0, xid=79)], usage).rows
    assert row["unresponsive_gpu_hours"] == pytest.approx(1 / 6, abs=1e-3)
    assert row["lost_gpu_hours"] == pytest.approx(8, abs=1e-3)


def test_runs_that_end_with_a_failure_are_interrupted_once_and_services_are_not(
    tmp_path: Path,
) -> None:
    def pod(name: str, end: float, kind: str = "Job") -> Row:
        return pod_row(
            name,
            owner_kind=kind,
            started_time=BEGIN_US + 2 * HOUR_US,
            ended_time=BEGIN_US + round(end * HOUR_US),
            container_id=f"id-{name}",
            container="main",
            requested='{"nvidia.com/gpu":"4"}',
        )

    names = ["ended", "later", "service", "unknown"]
    incidents = [incident(5, gpu=f"GPU-{gpu}", node=f"n{gpu}", on=names) for gpu in range(2)]
    pods = [pod("ended", 5.1), pod("later", 9), pod("service", 5, kind="Deployment")]
    (row,) = faults(tmp_path, incidents, fleet(), pods=pods, by=("model",)).rows
    assert row["interrupted_gpu_hours"] == pytest.approx(3 * 4)
    assert row["failures"] == 2


def test_an_interrupted_run_without_a_known_size_is_named_and_a_mig_instance_has_its_part(
    tmp_path: Path,
) -> None:
    times: dict[str, Value] = {
        "started_time": BEGIN_US + 3 * HOUR_US,
        "ended_time": BEGIN_US + 5 * HOUR_US,
        "container": "main",
        "owner_kind": "Job",
    }
    pods = [
        pod_row(name, container_id=f"id-{name}", requested=requested, **times)
        for name, requested in (
            ("claim", "{}"),
            ("share", '{"nvidia.com/gpu.shared":"1"}'),
            ("mig", '{"nvidia.com/mig-1g.6gb":"1"}'),
        )
    ]
    # An A30 has four slices.
    slices: dict[str, Value] = {"compute_slices": 1, "gpu_compute_slices": 4}
    usage = [*fleet(), allocated(0, "mig", gpu="MIG-a", mig_profile="1g.6gb", **slices)]
    failed = incident(5, gpu="GPU-1", node="n1", on=["claim", "share", "mig"])
    found = faults(tmp_path, [failed], usage, pods=pods, by=("node",))
    assert found.rows[0]["interrupted_gpu_hours"] == pytest.approx(2 / 4)
    assert (
        "Interrupted runs with claims or shares of unknown size: 2. Their GPU-hours are not"
        " included."
    ) in found.notes


def test_failures_without_usage_are_named_and_a_fleet_without_failures_has_no_rows(
    tmp_path: Path,
) -> None:
    found = faults(tmp_path / "one", [incident(1, gpu="PCI:0000:17:00")], fleet())
    assert found.rows == []
    assert found.notes == ["Failures of GPUs without usage are not included: 1."]
    assert faults(tmp_path / "other", [], fleet()) == Answer(rows=[])


@pytest.mark.parametrize("damaged", ["{", "7", "[7]", '[{"pod":"a"}]', '[{"uid":{}}]', "{}"])
def test_a_failure_counts_even_if_its_pods_cannot_be_read(damaged: str, tmp_path: Path) -> None:
    found = faults(tmp_path, [incident(5, gpu="GPU-1", node="n1", pods=damaged)], fleet())
    (row,) = found.rows
    assert (row["failures"], row["interrupted_gpu_hours"]) == (1, 0)


def test_time_without_a_response_is_a_result_without_a_failure(tmp_path: Path) -> None:
    found = faults(tmp_path, [], [allocated(0, "train", unresponsive_ns=HOUR_NS)])
    (row,) = found.rows
    assert (row["failures"], row["unresponsive_gpu_hours"], found.is_found) == (0, 1, True)
    assert REPORT.codes[0] == (
        "at least one GPU failed, did not respond, or was free on a cordoned node"
    )


def test_gpus_are_lost_to_a_cordon_in_the_minutes_in_which_they_are_free(tmp_path: Path) -> None:
    """A cordon of two and a half hours begins in the middle of the second hour."""
    nodes = [node_row(unschedulable=False), node_row(hour=4, unschedulable=False)]
    nodes += [
        node_row(hour=1.5, unschedulable=True),
        node_row(hour=2, unschedulable=True, zone="b"),
    ]
    busy = [allocated(hour, "train", gpu="GPU-busy") for hour in range(HOURS)]
    free = [
        allocated(hour, None, gpu="GPU-free", allocated_minutes=minutes)
        for hour in range(HOURS)
        for minutes in [WHOLE if hour % 2 else None]
    ]
    # A pod releases the GPU 15 minutes after the cordon.
    left = (1 << 45) - 1
    drained = [
        allocated(1, "train", HOUR_NS * 3 // 4, gpu="GPU-drained", allocated_minutes=left),
        allocated(1, None, HOUR_NS // 4, gpu="GPU-drained", allocated_minutes=WHOLE - left),
    ]
    # The second GPU of a slot of half an hour does not respond, which is lost for another reason.
    lost = [allocated(2, None, gpu="GPU-lost", unresponsive_ns=HOUR_NS, busy_ns=None)]
    usage = [*busy, *free, *drained, *lost]
    found = faults(tmp_path, [], usage, nodes=nodes, by=("cause",))
    cordoned, unresponsive = found.rows
    assert (cordoned["cause"], unresponsive["cause"]) == ("cordoned", "lost")
    assert cordoned["cordoned_gpu_hours"] == cordoned["lost_gpu_hours"] == 2.5 + 0.25
    assert (cordoned["failures"], unresponsive["cordoned_gpu_hours"]) == (0, 0)


def test_a_node_is_not_cordoned_while_that_is_unknown(tmp_path: Path) -> None:
    """The first version with a cordon does not apply to the time before it."""
    usage = [allocated(hour, None, allocated_minutes=WHOLE) for hour in range(HOURS)]
    nodes = [node_row(hour=HOURS - 1, unschedulable=True)]
    found = faults(tmp_path, [], usage, nodes=nodes)
    assert [row["cordoned_gpu_hours"] for row in found.rows] == [1]
    # The only group of GPUs has this row, so no note counts groups without one.
    assert not found.notes

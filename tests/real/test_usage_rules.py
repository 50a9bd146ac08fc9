"""The shipped recording rules of usage, evaluated by promtool on series of the sink."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any, Final

from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RULES: Final = ROOT / "k8s" / "chart" / "rules" / "gpuledger.usage.rules.yaml"
HOUR: Final = 240
"""Samples in an hour, one every 15 seconds."""
Labels = dict[str, str]
Expected = list[tuple[Labels, float]]


def written(metric: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{metric}{{{pairs}}}"


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    """Return a series of node `n`, with a value every 15 seconds."""
    return {
        "series": written(metric, {"cluster": "c", "node": "n", **labels}),
        "values": values,
    }


def check(
    given: list[dict[str, str]], queries: Mapping[str, Expected], promtool: Path, folder: Path
) -> None:
    """Assert the results of queries two hours after the series begin."""
    tests: list[dict[str, Any]] = [
        {
            "expr": query,
            "eval_time": "2h",
            "exp_samples": [
                {"labels": written("", labels), "value": value} for labels, value in expected
            ],
        }
        for query, expected in queries.items()
    ]
    test = {"interval": "15s", "input_series": given, "promql_expr_test": tests}
    file = folder / "test.yml"
    file.write_text(
        json.dumps(
            {
                "rule_files": [str(RULES)],
                "evaluation_interval": "1m",
                "fuzzy_compare": True,
                "tests": [test],
            }
        )
    )
    command = [str(promtool), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def pod(name: str, *, busy: float, labels: Labels) -> list[dict[str, str]]:
    """Return the series of a pod that has half of a GPU for an hour.

    Its record arrives after a minute. Its counters keep their values for ten minutes after its end.
    """
    of = {"namespace": "research", "pod": name, "pod_uid": f"uid-{name}"}
    used = {"gpu_uuid": "GPU-1", "category": "pod", "container": "main", **of}
    per_second = {
        "gpuledger_gpu_allocated_seconds_total": 0.5,
        "gpuledger_gpu_busy_seconds_total": busy,
        "gpuledger_gpu_unused_seconds_total": 0.5 - busy,
        "gpuledger_gpu_energy_joules_total": 200,
        "gpuledger_gpu_unused_energy_joules_total": 40,
    }
    return [
        series("gpuledger_pod_info", "1x3 stale", pod_uid=of["pod_uid"]),
        series("gpuledger_pod_info", f"_x3 1x{HOUR - 4} stale", **of, **labels),
        *(
            series(metric, f"0+{15 * step}x{HOUR} {15 * step * HOUR}+0x40 stale", **used)
            for metric, step in per_second.items()
        ),
    ]


def day(record: str, *, digit: str = "0.01") -> str:
    """Return the query of a record's hours, without what Prometheus extrapolates."""
    return f"round(sum_over_time({record}[2h]) / 60, {digit})"


TRAIN: Final = {"owner_kind": "Job", "owner_name": "train"}
PODS: Final = [
    *pod("a", busy=0.25, labels={**TRAIN, "label_team": "vision"}),
    *pod("b", busy=0.5, labels=TRAIN),
    *pod("c", busy=0.0, labels={}),
    series("gpuledger_namespace_info", "1x600", namespace="research", label_team="lab"),
]
"""Pods with a team of their own, with their namespace's, and without an owner."""


def test_an_hour_of_a_team_and_its_energy_are_counted_once(promtool: Path, tmp_path: Path) -> None:
    """The team is the pod's, or else its namespace's."""
    vision, lab = {"cluster": "c", "label_team": "vision"}, {"cluster": "c", "label_team": "lab"}
    expected: dict[str, Expected] = {
        day("team:gpuledger_gpu_allocated_seconds:rate5m"): [(lab, 1), (vision, 0.5)],
        day("team:gpuledger_gpu_busy_seconds:rate5m"): [(lab, 0.5), (vision, 0.25)],
        day("team:gpuledger_gpu_energy_joules:rate5m", digit="2"): [(lab, 480), (vision, 240)],
    }
    check(PODS, expected, promtool, tmp_path)


def test_unused_hours_are_counted_by_workload(promtool: Path, tmp_path: Path) -> None:
    research = {"cluster": "c", "namespace": "research"}
    expected: Expected = [
        ({**research, "label_team": "lab"}, 0.5),
        ({**research, "label_team": "lab", **TRAIN}, 0),
        ({**research, "label_team": "vision", **TRAIN}, 0.25),
    ]
    check(
        PODS,
        {day("workload:gpuledger_gpu_unused_seconds:rate5m"): expected},
        promtool,
        tmp_path,
    )


def test_use_of_a_pod_without_a_uid_is_not_lost(promtool: Path, tmp_path: Path) -> None:
    used = {"gpu_uuid": "GPU-1", "category": "pod", "namespace": "research", "pod": "named"}
    check(
        [series("gpuledger_gpu_allocated_seconds_total", "0+15x600", **used)],
        {"round(team:gpuledger_gpu_allocated_seconds:rate5m, 0.01)": [({"cluster": "c"}, 1)]},
        promtool,
        tmp_path,
    )


def instance(number: int, profile: str, **allocatee: str) -> list[dict[str, str]]:
    """Return the series of a MIG instance of GPU-1 that is allocated to a pod or job, or free."""
    uuid = f"MIG-{number}"
    traits = {"parent_uuid": "GPU-1", "model": "H100", "mig_profile": profile}
    allocated = {f"allocated_{name}": value for name, value in allocatee.items()}
    return [
        series("gpuledger_gpu_info", "1x600", gpu_uuid=uuid, gpu_index="0", **traits),
        series("gpuledger_allocation_gpu_ratio", "1x600", gpu_uuid=uuid, **allocated),
    ]


NOTEBOOK: Final = {"namespace": "research", "pod": "notebook", "pod_uid": "uid-notebook"}
INSTANCES: Final = [
    series("gpuledger_gpu_info", "1x600", gpu_uuid="GPU-1", gpu_index="0", model="H100"),
    series("gpuledger_allocation_gpu_ratio", "1x600", gpu_uuid="GPU-1"),
    *instance(1, "1g.10gb"),
    *instance(2, "1g.10gb", **NOTEBOOK, container="main"),
    *instance(3, "1g.10gb", **NOTEBOOK, container="main"),
    *instance(4, "3g.40gb", job_id="7"),
    *instance(5, "2g.20gb", pod_state="foreign"),
]


def test_mig_instances_without_an_allocation_are_counted_by_profile(
    promtool: Path, tmp_path: Path
) -> None:
    traits = {"cluster": "c", "model": "H100"}
    expected: Expected = [
        ({**traits, "mig_profile": "1g.10gb"}, 1),
        ({**traits, "mig_profile": "2g.20gb"}, 0),
        ({**traits, "mig_profile": "3g.40gb"}, 0),
    ]
    check(
        INSTANCES,
        {"round(mig_profile:gpuledger_mig_instances_unallocated:count)": expected},
        promtool,
        tmp_path,
    )


def test_xids_of_a_gpu_are_those_of_the_pods_that_have_it_or_one_of_its_instances(
    promtool: Path, tmp_path: Path
) -> None:
    """With the most frequent code; a GPU without XIDs and a pod elsewhere have none."""
    other = {"allocated_namespace": "research", "allocated_pod": "other"}
    given = [
        *INSTANCES,
        series("gpuledger_gpu_info", "1x600", gpu_uuid="GPU-2", gpu_index="1"),
        series("gpuledger_allocation_gpu_ratio", "1x600", gpu_uuid="GPU-2", **other),
        series("gpuledger_gpu_xid_errors_total", "_x470 0x5 3x20", gpu_uuid="GPU-1", xid="31"),
        series("gpuledger_gpu_xid_errors_total", "_x470 0x5 1x20", gpu_uuid="GPU-1", xid="13"),
        series("gpuledger_gpu_xid_errors_total", "2x600", gpu_uuid="GPU-2", xid="79"),
    ]
    labels = {"cluster": "c", "node": "n", "gpu_uuid": "GPU-1", "xid": "31", **NOTEBOOK}
    check(
        given,
        {"round(pod:gpuledger_gpu_xid_errors:increase10m)": [(labels, 3)]},
        promtool,
        tmp_path,
    )

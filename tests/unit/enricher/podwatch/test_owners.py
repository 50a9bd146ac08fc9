"""Which workload a pod belongs to, as far as the pod itself shows it."""

import pytest

from gpuledger_enricher.podwatch.objects import OwnerReference
from gpuledger_enricher.podwatch.pod_facts import known_owner
from tests.unit.enricher.podwatch.builders import CREATED_NS

CREATED_MINUTE = CREATED_NS // 60_000_000_000
TWO_YEARS_MINUTES = 2 * 366 * 24 * 60

JOBSET = {"jobset.sigs.k8s.io/jobset-name": "pretrain"}
LWS = {"leaderworkerset.sigs.k8s.io/name": "vllm"}
LAUNCHER = {
    "training.kubeflow.org/job-name": "pi",
    "training.kubeflow.org/job-role": "launcher",
    "training.kubeflow.org/operator-name": "mpi-operator",
}
RAY_JOB = {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "tune"}
HASH = {"pod-template-hash": "5d4f8c7b9"}
ROLLOUT_HASH = {"rollouts-pod-template-hash": "5d4f8c7b9"}
INFERENCE = {"serving.kserve.io/inferenceservice": "llama"}
SPARK = {"sparkoperator.k8s.io/app-name": "etl", "spark-role": "executor"}


def owner(
    kind: str, name: str, labels: dict[str, str], *, created_time_ns: int = CREATED_NS
) -> tuple[str | None, str | None]:
    references = [
        OwnerReference(kind="Other", name="beside", controller=False),
        OwnerReference(kind=kind, name=name, controller=True),
    ]
    return known_owner(references, labels, created_time_ns=created_time_ns)


@pytest.mark.parametrize(
    "kind",
    [
        "StatefulSet",
        "DaemonSet",
        "Job",
        "ReplicaSet",
        "Node",
        "PyTorchJob",
        "MPIJob",
        "RayCluster",
        "LeaderWorkerSet",
        "Workflow",
        "Notebook",
        "Pod",
    ],
)
def test_the_creator_of_a_pod_is_its_workload_with_its_own_kind_and_name(kind: str) -> None:
    assert owner(kind, "mine", {"app": "mine"}) == (kind, "mine")


@pytest.mark.parametrize(
    ("maker", "labels", "expected"),
    [
        (("ReplicaSet", "web-5d4f8c7b9"), HASH, ("Deployment", "web")),
        (("ReplicaSet", "web-5d4f8c7b9"), ROLLOUT_HASH, ("Rollout", "web")),
        (
            ("ReplicaSet", "llama-predictor-5d4f8c7b9"),
            HASH | INFERENCE,
            ("InferenceService", "llama"),
        ),
        (("StatefulSet", "vllm"), LWS, ("LeaderWorkerSet", "vllm")),
        (("StatefulSet", "vllm-0"), LWS, ("LeaderWorkerSet", "vllm")),
        (("Job", "pretrain-workers-0"), JOBSET, ("JobSet", "pretrain")),
        (("Job", "pi-launcher"), LAUNCHER, ("MPIJob", "pi")),
        (("Job", "tune"), RAY_JOB, ("RayJob", "tune")),
        (("RayCluster", "tune-x7k2p"), RAY_JOB, ("RayJob", "tune")),
        (("Pod", "etl-driver"), SPARK, ("SparkApplication", "etl")),
    ],
)
def test_a_creator_that_belongs_to_another_workload_is_replaced_by_that_workload(
    maker: tuple[str, str], labels: dict[str, str], expected: tuple[str, str]
) -> None:
    assert owner(*maker, labels) == expected


@pytest.mark.parametrize(
    ("maker", "labels"),
    [
        (("ReplicaSet", "by-hand"), {}),
        (("ReplicaSet", "web-other"), HASH),
        (("ReplicaSet", "web-None"), {}),
        (("ReplicaSet", "web-"), {"pod-template-hash": ""}),
        (("DaemonSet", "logs"), LWS | JOBSET | HASH | SPARK),
        (("PyTorchJob", "pi"), LAUNCHER | RAY_JOB),
        (("StatefulSet", "db"), JOBSET | RAY_JOB),
        (("Job", "x"), {"jobset.sigs.k8s.io/jobset-name": ""}),
        (("Job", "x"), {"ray.io/originated-from-cr-name": "tune"}),
        (("Job", "x"), {"ray.io/originated-from-crd": "RayJob"}),
    ],
)
def test_a_label_that_does_not_fit_the_creator_changes_nothing(
    maker: tuple[str, str], labels: dict[str, str]
) -> None:
    assert owner(*maker, labels) == maker


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"nightly-{CREATED_MINUTE}", ("CronJob", "nightly")),
        (f"a-b-{CREATED_MINUTE - 60}", ("CronJob", "a-b")),
        (f"nightly-{CREATED_MINUTE + 5}", ("CronJob", "nightly")),
        (f"nightly-{CREATED_MINUTE + 6}", None),
        (f"nightly-{CREATED_MINUTE - TWO_YEARS_MINUTES}", ("CronJob", "nightly")),
        (f"nightly-{CREATED_MINUTE - TWO_YEARS_MINUTES - 1}", None),
        (f"{CREATED_MINUTE}", None),
        (f"-{CREATED_MINUTE}", None),
        ("train-20261121", None),
        ("train-7", None),
        ("nightly-", None),
        ("nightly-²", None),
        ("nightly-x7k2p", None),
    ],
)
def test_a_job_named_by_the_minute_of_its_schedule_belongs_to_a_cron_job(
    name: str, expected: tuple[str, str] | None
) -> None:
    assert owner("Job", name, {}) == (expected or ("Job", name))


def test_the_minute_of_a_schedule_is_compared_with_the_pods_creation_time() -> None:
    assert owner("Job", f"nightly-{CREATED_MINUTE}", {}, created_time_ns=0)[0] == "Job"


@pytest.mark.parametrize(
    "references", [None, [], [OwnerReference(kind="Backup", name="b", controller=False)]]
)
def test_a_pod_without_a_controller_has_no_owner(references: list[OwnerReference] | None) -> None:
    assert known_owner(references, LWS, created_time_ns=CREATED_NS) == (None, None)

"""Single processes on the page: only on request, and at most the allowed number."""

from gpuledger.records import ProcessChange, ProcessRecord
from gpuledger_agent.metrics import PROCESS_SERIES_DROPPED
from gpuledger_agent.settings import ExpositionSettings
from tests.unit.agent.exposition.builders import GIB, Node, gpu, node, process, sample

OWNER = "ml/train-0/main"
PID_POD = "nvidia_pid_pod"


def shown(it: Node, count: int) -> None:
    processes = [process(0, 0, pid=pid, memory_used_bytes=pid * GIB) for pid in range(1, count + 1)]
    it.show(sample(gpu(0), containers=["one"], processes=processes))


def dropped() -> float:
    return next(
        one.value
        for family in PROCESS_SERIES_DROPPED.collect()
        for one in family.samples
        if one.name.endswith("_total")
    )


def test_processes_are_shown_only_on_request() -> None:
    it = node(one=OWNER)
    shown(it, 3)
    assert not it.lines(PID_POD)
    assert not it.lines("gpuledger_process_gpu_memory_bytes")


def test_a_pid_has_its_pod_and_its_memory_on_all_gpus_in_mib() -> None:
    it = node(ExpositionSettings(process_series=True), one=OWNER)
    seen = ProcessRecord(
        cluster="default",
        node="node-1",
        boot_id="boot",
        pid=7,
        time_ns=1,
        change=ProcessChange.SEEN,
        gpu_uuids=["GPU-0", "GPU-1"],
        command="python",
    )
    it.show(
        sample(
            gpu(0),
            gpu(1),
            containers=["one"],
            processes=[
                process(0, 0, pid=7),
                process(1, 0, pid=7),
                process(1, None, pid=8),
                process(1, 0, pid=9, ended=True),
            ],
        ),
        processes=[seen],
    )
    (line,) = it.lines(PID_POD)
    assert line == (
        'nvidia_pid_pod{pid="7",process_name="python",pod_name="train-0",namespace="ml"'
        ',node_name="node-1"} 2048'
    )
    labels = ("pid", "gpu_index", "pod")
    assert it.values("gpuledger_process_gpu_memory_bytes", *labels) == {
        ("7", "0", "train-0"): GIB,
        ("7", "1", "train-0"): GIB,
        ("8", "1", ""): GIB,
    }
    assert it.values("gpuledger_process_gpu_busy_ratio", "pid", "gpu_index").keys() == {
        ("7", "0"),
        ("7", "1"),
        ("8", "1"),
    }


def test_the_processes_with_the_most_memory_are_shown_and_the_others_counted() -> None:
    before = dropped()
    it = node(ExpositionSettings(process_series=True, max_process_series=2), one=OWNER)
    shown(it, 5)
    assert it.values(PID_POD, "pid").keys() == {("5",), ("4",)}
    assert dropped() - before == 3

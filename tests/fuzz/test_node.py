"""Input of the agent on a node: the spool, the kubelet, cgroups, the kernel log."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from gpuledger.clock import SystemClock
from gpuledger.codec import validate
from gpuledger.records import GpuFacts
from gpuledger.runtime import Backoff
from gpuledger.runtime.readiness import Check
from gpuledger_agent.core.incidents import Detection, read_bus, read_xid_line
from gpuledger_agent.host.cgroup import find_node_paths, locate
from gpuledger_agent.host.kmsg import KmsgReader
from gpuledger_agent.host.kubelet.assignments import DeviceAssignment, DeviceIndex
from gpuledger_agent.host.kubelet.messages import parse_answer
from gpuledger_agent.host.kubelet.pod_labels import select_labels
from gpuledger_agent.host.kubelet.pod_list import (
    ListedContainer,
    ListedMetadata,
    ListedPod,
    ListedSpec,
    parse_pods,
)
from gpuledger_agent.host.kubelet.shares.find import SOURCES, find_shares
from gpuledger_agent.host.kubelet.shares.merge import merge_allocations
from tests.fakes.kubelet_api import pod, pod_list
from tests.fuzz.mutations import changed_bytes

DATA = Path(__file__).parents[1] / "data"
POD_LISTS = [
    json.dumps(found).encode()
    for found in (pod_list(), pod_list(pod("1", team="vision", app="chat"), pod("2")))
]
SHARES = {
    "hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,3000,25:;GPU-1,NVIDIA,5000,0:;",
    "volcano.sh/vgpu-ids-new": "GPU-0,NVIDIA,3000,25:;",
    "scheduler.framework.gpushare.allocation": '{"0":{"1":4}}',
    "gpushare.alibabacloud.com/core-percentage": '{"0":{"1":40}}',
    "ALIYUN_COM_GPU_MEM_IDX": "1",
    "ALIYUN_COM_GPU_MEM_POD": "4",
    "ALIYUN_COM_GPU_MEM_DEV": "16",
    "scheduling.koordinator.sh/device-allocated": json.dumps(
        {"gpu": [{"minor": 1, "resources": {"koordinator.sh/gpu-memory": "16Gi"}}]}
    ),
    "gpu-fraction": "0.5",
    "gpu-memory": "2000",
}
CGROUPS = [
    json.loads(line)["line"].encode()
    for line in (DATA / "cgroup-vectors.jsonl").read_text().splitlines()[:40]
]
KMSG = [
    b"4,1,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off\n",
    b"3,2,9,-;NVRM: Xid (PCI:0000:3b:00.0): 13, Graphics Exception: ESR 0x404600=0x80000002\n",
    b"6,3,9,-;NVRM: Xid (0000:01:00): 31, pid='<unknown>', name=<unknown>, Ch 0000\n SUB=a\n",
    b"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1",
]


def field(number: int, data: bytes) -> bytes:
    """Return a Protocol Buffers field that contains bytes."""
    assert len(data) < 2**14
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


DEVICES = field(1, b"nvidia.com/gpu") + field(2, b"GPU-1") + field(2, b"GPU-2::3")
CLAIM = (
    field(2, b"c") + field(3, b"ns") + field(4, field(2, b"gpu.nvidia.com") + field(4, b"gpu-0"))
)
CONTAINER = field(1, b"main") + field(2, DEVICES) + field(5, CLAIM)
ANSWERS = [field(1, field(1, b"pod") + field(2, b"ns") + field(3, CONTAINER)) * 3]


@given(changed_bytes(ANSWERS))
def test_a_kubelet_response_is_read_or_rejected(data: bytes) -> None:
    try:
        pods = parse_answer(data)
    except ValueError:
        return
    for listed in pods:
        (listed.name + listed.namespace).encode()


@given(st.sampled_from(sorted(SHARES)), st.data())
def test_a_share_in_an_annotation_is_a_valid_allocation_or_is_named(
    annotation: str, data: DataObject
) -> None:
    changed = data.draw(changed_bytes([SHARES[annotation].encode()]))
    metadata = ListedMetadata(
        uid="1",
        name="chat-0",
        namespace="serving",
        annotations=SHARES | {annotation: changed.decode(errors="replace")},
    )
    containers = [ListedContainer("main"), ListedContainer("side")]
    listed = ListedPod(metadata=metadata, spec=ListedSpec(containers=containers))
    facts = GpuFacts(
        uuid="GPU-1",
        index=0,
        minor_number=1,
        memory_total_bytes=2**34,
        instances=[],
        capabilities=[],
    )
    for source in SOURCES:
        stated = find_shares([listed], [source], placeholder_namespaces=("reserved",))
        # As if the kubelet had given devices whose ids only count shares.
        devices = [
            DeviceAssignment(
                namespace=namespace,
                pod="chat-0",
                container=container,
                resource_name="nvidia.com/gpu",
                device_id=device_id,
            )
            for namespace, container, device_id in (
                ("serving", "main", "0-1"),
                ("serving", "side", "0-2"),
                ("reserved", "main", "GPU-1"),
            )
        ]
        merged = merge_allocations(
            devices, stated, DeviceIndex.of([facts]), placeholder_namespaces=("reserved",)
        )
        for allocation in merged.allocations:
            validate(allocation)
        "".join(merged.problems).encode(errors="replace")


@given(changed_bytes(POD_LISTS))
def test_pod_labels_from_the_kubelet_are_valid_in_kubernetes_or_rejected(data: bytes) -> None:
    try:
        pods = parse_pods(data, node="node-1")
    except ValueError:
        return
    for uid, labels in select_labels(pods, ("team", "app")).items():
        uid.encode()
        assert {name for name, _ in labels} <= {"label_team", "label_app"}
        for _, value in labels:
            assert value.isascii()
            assert 0 < len(value) <= 63


@given(changed_bytes(CGROUPS))
def test_every_cgroup_gives_the_place_of_a_process_or_nothing(data: bytes) -> None:
    text = data.decode(errors="replace")
    found = locate(text, node_paths=find_node_paths(text))
    assert found.container_id is None or len(found.container_id) == 64
    assert found.pod_uid is None or len(found.pod_uid) in (32, 36)


class OneRecord:
    """A kernel log with one record."""

    def __init__(self, record: bytes) -> None:
        self._records = [record]

    def read(self) -> bytes:
        if not self._records:
            raise BlockingIOError
        return self._records.pop()

    def close(self) -> None:
        pass


@given(changed_bytes(KMSG))
def test_every_record_of_the_kernel_log_is_an_xid_or_ignored(data: bytes) -> None:
    found: list[Detection] = []
    reader = KmsgReader(
        open_log=lambda: OneRecord(data),
        clock=SystemClock(),
        buses=lambda: {"00000000:3B:00.0": "GPU-1"},
        on_detection=found.append,
        check=Check(),
        backoff=Backoff(),
    )
    assert not reader.read(OneRecord(data))
    assert all(one.xid is not None and 0 <= one.xid < 2**31 for one in found)


@given(st.sampled_from(["NVRM: Xid (PCI:0000:3b:00): 79, x", "00000000:3B:00.0"]), st.text())
def test_every_text_is_a_line_of_the_driver_or_ignored(line: str, text: str) -> None:
    for one in (line + text, text + line, text):
        read_xid_line(one)
        read_bus(one)

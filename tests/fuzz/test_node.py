"""Input of the agent on a node: the spool, the kubelet, cgroups, the kernel log."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import SystemClock
from gpuledger.runtime import Backoff
from gpuledger.runtime.readiness import Check
from gpuledger_agent.core.incidents import Detection, read_bus, read_xid_line
from gpuledger_agent.host.cgroup import find_node_paths, locate
from gpuledger_agent.host.kmsg import KmsgReader
from gpuledger_agent.host.kubelet.messages import parse_answer
from gpuledger_agent.host.kubelet.pod_labels import parse_pods
from tests.fakes.kubelet_api import pod, pod_list
from tests.fuzz.mutations import changed_bytes

DATA = Path(__file__).parents[1] / "data"
POD_LISTS = [
    json.dumps(found).encode()
    for found in (pod_list(), pod_list(pod("1", team="vision", app="chat"), pod("2")))
]
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


@given(changed_bytes(POD_LISTS))
def test_pod_labels_from_the_kubelet_are_valid_in_kubernetes_or_rejected(data: bytes) -> None:
    try:
        pods = parse_pods(data, node="node-1", names=("team", "app"))
    except ValueError:
        return
    for uid, labels in pods.items():
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

"""What the agent reads on a node: the spool, the kubelet, cgroups, the kernel's log."""

import json
import struct
import zlib
from pathlib import Path

import cramjam
import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Message
from gpuledger.clock import SystemClock
from gpuledger.runtime import Backoff
from gpuledger.runtime.readiness import Check
from gpuledger_agent.core.incidents import Detection, read_bus, read_xid_line
from gpuledger_agent.host.cgroup import find_node_paths, locate
from gpuledger_agent.host.kmsg import KmsgReader
from gpuledger_agent.host.kubelet.messages import parse_answer
from gpuledger_agent.host.kubelet.pod_labels import parse_pods
from gpuledger_agent.publish.spool_file import (
    HEAD_BYTES,
    DamagedError,
    head_of,
    is_whole,
    pack_frame,
    read_head,
    unpack_frame,
)
from tests.fakes.kubelet_api import pod, pod_list
from tests.fuzz.mutations import changed_bytes

DATA = Path(__file__).parents[1] / "data"
BUNDLE = (("t", Message(key=b"n", value=b"{}" * 100, timestamp_ms=5)),)
FRAMES = [
    pack_frame([BUNDLE], spooled_ms=7),
    pack_frame([BUNDLE] * 20, spooled_ms=2**40),
]
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
    """Return a field of Protocol Buffers that has bytes."""
    assert len(data) < 2**14
    size = bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


DEVICES = field(1, b"nvidia.com/gpu") + field(2, b"GPU-1") + field(2, b"GPU-2::3")
CLAIM = (
    field(2, b"c") + field(3, b"ns") + field(4, field(2, b"gpu.nvidia.com") + field(4, b"gpu-0"))
)
CONTAINER = field(1, b"main") + field(2, DEVICES) + field(5, CLAIM)
ANSWERS = [field(1, field(1, b"pod") + field(2, b"ns") + field(3, CONTAINER)) * 3]


def checked(body: bytes, *, bundles: int) -> bytes:
    """Return a frame with this body, whose length and checksum fit, so that it is looked at."""
    behind = struct.pack("<Iqq", bundles, 5, 7)
    return struct.pack("<II", len(body), zlib.crc32(behind + body)) + behind + body


def bodies() -> st.SearchStrategy[bytes]:
    """Return bodies that were changed before they were compressed, or afterwards."""
    packed = [frame[HEAD_BYTES:] for frame in FRAMES]
    unpacked = changed_bytes([bytes(cramjam.zstd.decompress(body)) for body in packed])
    return changed_bytes(packed) | unpacked.map(lambda body: bytes(cramjam.zstd.compress(body)))


@given(changed_bytes(FRAMES))
def test_a_frame_of_the_spool_is_whole_or_damaged(data: bytes) -> None:
    read_head(data[:HEAD_BYTES])
    check_frame(data)


def packed(*bundles: object) -> bytes:
    return bytes(cramjam.zstd.compress(msgspec.msgpack.encode(bundles)))


@example(body=packed(), bundles=1)
@example(body=packed(()), bundles=1)
@example(body=packed(BUNDLE), bundles=2)
@given(body=bodies().filter(bool), bundles=st.sampled_from([1, 2, 20, 10_000]))
def test_a_frame_that_was_written_as_it_is_holds_parcels_or_is_damaged(
    body: bytes, bundles: int
) -> None:
    frame = checked(body, bundles=bundles)
    assert is_whole(frame)
    check_frame(frame)


def check_frame(data: bytes) -> None:
    try:
        bundles = unpack_frame(data)
    except DamagedError:
        return
    assert len(bundles) == head_of(data).bundles
    assert unpack_frame(pack_frame(bundles, spooled_ms=1)) == bundles


@given(changed_bytes(ANSWERS))
def test_the_kubelets_answer_is_read_or_none(data: bytes) -> None:
    try:
        pods = parse_answer(data)
    except ValueError:
        return
    for listed in pods:
        (listed.name + listed.namespace).encode()


@given(changed_bytes(POD_LISTS))
def test_the_kubelets_pods_have_labels_that_kubernetes_allows_or_are_refused(data: bytes) -> None:
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
def test_every_cgroup_says_where_a_process_runs_or_that_it_does_not(data: bytes) -> None:
    text = data.decode(errors="replace")
    found = locate(text, node_paths=find_node_paths(text))
    assert found.container_id is None or len(found.container_id) == 64
    assert found.pod_uid is None or len(found.pod_uid) in (32, 36)


class OneRecord:
    """A kernel's log with one record."""

    def __init__(self, record: bytes) -> None:
        self._records = [record]

    def read(self) -> bytes:
        if not self._records:
            raise BlockingIOError
        return self._records.pop()

    def close(self) -> None:
        pass


@given(changed_bytes(KMSG))
def test_every_record_of_the_kernels_log_is_an_xid_or_none(data: bytes) -> None:
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
def test_every_text_is_a_line_of_the_driver_or_none(line: str, text: str) -> None:
    for one in (line + text, text + line, text):
        read_xid_line(one)
        read_bus(one)

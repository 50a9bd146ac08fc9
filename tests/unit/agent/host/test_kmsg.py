"""The kernel log as a source of XIDs."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Backoff, Check
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.host.kmsg import DeviceKmsg, Kmsg, KmsgReader, RecordTime
from gpuledger_agent.metrics import KMSG_FAILURES, KMSG_OVERRUNS
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.procfs import SimulatedKmsg
from tests.metric_values import value_of
from tests.unit.agent.core.incidents.builders import EPOCH_NS, failing_node

UUID = "GPU-1"
BUSES = {"00000000:1B:00.0": UUID}
LINE = "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


def record(text: str, stamp_us: int = 0) -> bytes:
    return f"4,512,{stamp_us},-;{text}\n".encode()


class Log:
    """A kernel log that returns records and errors, one per read."""

    def __init__(self, records: Iterable[bytes | OSError]) -> None:
        self.records = list(records)
        self.closed = False

    def read(self) -> bytes:
        if not self.records:
            raise BlockingIOError
        first = self.records.pop(0)
        if isinstance(first, OSError):
            raise first
        return first

    def close(self) -> None:
        self.closed = True


class Reading:
    """A reader over logs that are opened one after another; ends when none is left."""

    def __init__(self, *logs: Log | OSError, clock: ManualClock | None = None) -> None:
        self.seen: list[Detection] = []
        self.check = Check()
        self.clock = clock or ManualClock(start_ns=EPOCH_NS)
        self._logs = list(logs)
        self.reader = KmsgReader(
            open_log=self._open,
            clock=self.clock,
            buses=lambda: BUSES,
            on_detection=self.seen.append,
            check=self.check,
            backoff=Backoff(first_seconds=1, jitter=lambda: 1),
        )

    def _open(self) -> Kmsg:
        if not self._logs:
            raise EndOfTestError
        first = self._logs.pop(0)
        if isinstance(first, OSError):
            raise first
        return first


class EndOfTestError(Exception):
    """There is no further log to open."""


def read(*records: bytes | OSError) -> list[Detection]:
    reading = Reading()
    assert not reading.reader.read(Log(records))
    return reading.seen


def test_a_line_is_a_detection_of_the_gpu_in_that_slot() -> None:
    assert read(record(LINE)) == [
        Detection(
            kind="xid",
            gpu_uuid=UUID,
            time_ns=EPOCH_NS,
            source="kmsg",
            xid=79,
            detail="GPU has fallen off the bus.",
            pid=7,
            command="python3",
        )
    ]


def test_an_xid_of_a_gpu_that_never_answered_is_reported_by_its_slot() -> None:
    (seen,) = read(record(LINE.replace("1b", "2b")))
    assert seen.gpu_uuid == "PCI:0000:2b:00"


@pytest.mark.parametrize(
    "noise",
    [
        b"6,1,2,-;usb 1-1: new device\n",
        b"6,1,2,-;NVRM: loading\n",
        b" SUBSYSTEM=pci\n DEVICE=+pci:0000:1b:00.0\n",
        b"12,512,7,-;" + LINE.encode() + b"\n",
        b"4,512,x,-;" + LINE.encode() + b"\n",
        "²,512,²,-;".encode() + LINE.encode() + b"\n",
        b"4,512," + b"9" * 5000 + b",-;" + LINE.encode() + b"\n",
        b"NVRM: Xid (PCI:0000:1b:00): 79\n",
        b"4,512,7,-;NVRM: Xid \xff\xfe\n",
        b"4,512,7,-;audit: comm='" + LINE.encode() + b"'\n",
        b"4,512,7,-;audit: x\r4,512,7,-;" + LINE.encode() + b"\n",
        b"4,512,7,-;audit: x\x0b4,512,7,-;" + LINE.encode() + b"\n",
        b"",
    ],
)
def test_other_kernel_messages_are_skipped(noise: bytes) -> None:
    assert [seen.xid for seen in read(noise, record(LINE))] == [79]


def test_a_record_with_its_dictionary_is_one_detection() -> None:
    assert len(read(record(LINE) + b" SUBSYSTEM=pci\n DEVICE=+pci:0000:1b:00.0\n")) == 1


def test_overwritten_records_are_counted_and_the_rest_is_read() -> None:
    before = value_of(KMSG_OVERRUNS)
    assert len(read(record(LINE), BrokenPipeError(), record(LINE))) == 2
    assert value_of(KMSG_OVERRUNS) == before + 1


def test_a_flooded_log_yields_to_other_tasks() -> None:
    reading = Reading()
    log = Log([record("noise")] * 1500)
    assert reading.reader.read(log)
    assert not reading.reader.read(log)


async def test_a_lost_log_is_reopened_after_a_wait_and_counted() -> None:
    first, second = Log([record(LINE), OSError("gone")]), Log([record(LINE), OSError("gone")])
    reading = Reading(first, PermissionError("refused"), second)
    before = value_of(KMSG_FAILURES)

    with pytest.raises(EndOfTestError):
        await reading.reader.run()

    assert len(reading.seen) == 2
    assert first.closed
    assert second.closed
    assert value_of(KMSG_FAILURES) == before + 3
    assert not reading.check.is_ok
    assert reading.clock.monotonic_ns() == (1 + 2 + 4) * NS_PER_SECOND


@pytest.mark.parametrize(
    ("stamp_seconds", "written_seconds"),
    [(100.2, 100.2), (100.0, 100.0), (100.5, 100.5), (22.0, 100.0), (0.0, 100.0), (178.0, 100.5)],
)
def test_a_plausible_stamp_is_used_and_others_are_limited(
    stamp_seconds: float, written_seconds: float
) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    times = RecordTime(clock)
    clock.advance(100)
    times.nothing_new()
    clock.advance(0.5)

    found_ns = times.time_ns(round(stamp_seconds * 1e6))

    assert found_ns == EPOCH_NS + round(written_seconds * NS_PER_SECOND)


def test_a_record_is_at_least_as_new_as_the_last_empty_read() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    reading = Reading(clock=clock)
    for _ in range(3):
        clock.advance(10)
        reading.reader.read(Log([]))
    clock.advance(0.5)
    reading.reader.read(Log([record(LINE, stamp_us=0)]))

    assert [seen.time_ns for seen in reading.seen] == [EPOCH_NS + 30 * NS_PER_SECOND]


def test_an_opened_file_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(record("old"))
    log = DeviceKmsg(path)
    with pytest.raises(BlockingIOError):
        log.read()
    with path.open("ab") as file:
        file.write(record(LINE))

    assert log.read() == record(LINE)
    log.close()


def test_a_pipe_works_as_the_log(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = DeviceKmsg(path)
    writer = os.open(path, os.O_WRONLY)
    with pytest.raises(BlockingIOError):
        log.read()
    os.write(writer, record(LINE))

    assert log.read() == record(LINE)
    os.close(writer)
    log.close()


def test_a_missing_log_raises_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DeviceKmsg(tmp_path / "none")


def test_a_played_log_has_only_new_xids_with_their_own_time() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    node = failing_node(
        {"at_seconds": 1, "xid": 31},
        {"at_seconds": 3, "xid": 94, "gpu_instance": 5, "pid": 77, "text": "Contained"},
        {"at_seconds": 3.5, "xid": 48, "reported_by": "nvml"},
        {"at_seconds": 4, "event": "double_bit_error"},
        clock=clock,
    )
    clock.advance(2)
    log: SimulatedKmsg = node.open_kmsg()
    reading = Reading(clock=clock)
    clock.advance(1)
    reading.reader.read(log)
    clock.advance(10)
    reading.reader.read(log)

    assert [(seen.xid, seen.gpu_instance, seen.pid) for seen in reading.seen] == [(94, 5, 77)]
    assert reading.seen[0].time_ns == EPOCH_NS + 3 * NS_PER_SECOND
    assert (reading.seen[0].gpu_uuid, reading.seen[0].detail) == (UUID, "Contained")

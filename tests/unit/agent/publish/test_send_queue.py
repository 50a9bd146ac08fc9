"""The disk is used only if necessary, and its failures do not stop publishing."""

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.runtime import Backoff, Check
from gpuledger_agent.metrics import (
    SPOOL_DROPPED,
    SPOOL_FAILURES,
    SPOOL_TICKS,
    SPOOL_USABLE,
    TICKS_DROPPED,
)
from gpuledger_agent.publish.disk import IoThread
from gpuledger_agent.publish.message_bundle import BundleQueue
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_agent.publish.spool import Spool
from tests.hanging import HANG_SECONDS
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    NODE,
    FlakyDisk,
    ImmediateDisk,
    Uptime,
    bundle_of,
    number_of,
    spool_in,
)

T = TypeVar("T")


class SettableClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FailingDisk(ImmediateDisk):
    """Fails all work while it has an error."""

    error: OSError | None = None

    @override
    async def run(self, work: Callable[[], T]) -> T:
        if self.error:
            raise self.error
        return work()


def send_queue_of(
    spool: Spool | None,
    *,
    disk: IoThread | None = None,
    clock: SettableClock | None = None,
    check: Check | None = None,
    max_ticks: int = 100,
    wait_seconds: float = 1,
) -> SendQueue:
    return SendQueue(
        queue=BundleQueue(max_bundles=max_ticks),
        spool=spool,
        check=check or Check(),
        spill_after_seconds=5,
        disk=disk or ImmediateDisk(),
        backoff=lambda **_: Backoff(
            first_seconds=wait_seconds, max_seconds=wait_seconds, jitter=lambda: 1.0
        ),
        now_seconds=clock or SettableClock(),
    )


def usable_in(folder: Path) -> float | None:
    """Return the metric's value for the spool in this directory; `None` without a series."""
    labels = {"directory": str(folder / f"default_{NODE}")}
    return REGISTRY.get_sample_value("gpuledger_agent_spool_usable", labels)


async def put(send_queue: SendQueue, clock: SettableClock, *numbers: int) -> None:
    """Put a bundle every second."""
    for number in numbers:
        clock.seconds += 1
        send_queue.put(bundle_of(number))
        for _ in range(3):
            await asyncio.sleep(0)


async def take_all(send_queue: SendQueue, count: int) -> list[int]:
    taken: list[int] = []
    while len(taken) < count:
        taken += map(number_of, await send_queue.take(max_bundles=2))
        await send_queue.ack()
    return taken


async def test_while_everything_is_sent_the_disk_is_not_used(tmp_path: Path) -> None:
    clock = SettableClock()
    send_queue = send_queue_of(spool_in(tmp_path), clock=clock)
    spilling = asyncio.create_task(send_queue.run())
    for number in range(20):
        await put(send_queue, clock, number)
        assert await take_all(send_queue, 1) == [number]
    assert value_of(SPOOL_TICKS) == 0
    spilling.cancel()


async def test_bundles_that_wait_too_long_go_to_the_disk_those_in_flight_first(
    tmp_path: Path,
) -> None:
    clock = SettableClock()
    send_queue = send_queue_of(spool_in(tmp_path), clock=clock)
    spilling = asyncio.create_task(send_queue.run())
    await put(send_queue, clock, 0)
    assert [number_of(one) for one in await send_queue.take(max_bundles=9)] == [0]
    await put(send_queue, clock, 1, 2, 3, 4)
    assert value_of(SPOOL_TICKS) == 0
    await put(send_queue, clock, 5)
    assert (value_of(SPOOL_TICKS), send_queue.bundles_in_memory) == (6, 0)
    await put(send_queue, clock, 6)
    await send_queue.ack()
    assert await take_all(send_queue, 6) == [1, 2, 3, 4, 5, 6]
    assert value_of(SPOOL_TICKS) == 0
    spilling.cancel()


async def test_older_bundles_found_on_the_disk_survive_an_acknowledgement_of_newer_ones(
    tmp_path: Path,
) -> None:
    spool, clock = spool_in(tmp_path), SettableClock()
    send_queue = send_queue_of(spool, clock=clock)
    spilling = asyncio.create_task(send_queue.run())
    await put(send_queue, clock, 1)
    assert [number_of(one) for one in await send_queue.take(max_bundles=9)] == [1]
    spool.append([bundle_of(0)])
    await put(send_queue, clock, *range(2, 9))
    assert send_queue.bundles_in_memory < 7
    await send_queue.ack()
    (oldest,) = await send_queue.take(max_bundles=1)
    assert number_of(oldest) == 0
    await send_queue.ack()
    assert await take_all(send_queue, 7) == list(range(2, 9))
    spilling.cancel()


async def test_bundles_of_an_earlier_agent_are_sent_before_new_ones(tmp_path: Path) -> None:
    before = spool_in(tmp_path)
    before.append([bundle_of(1), bundle_of(2)])
    before.close()
    send_queue, clock = send_queue_of(spool_in(tmp_path)), SettableClock()
    await put(send_queue, clock, 3)
    assert await take_all(send_queue, 3) == [1, 2, 3]


async def test_a_disk_error_is_counted_and_reported_and_memory_is_used(
    tmp_path: Path,
) -> None:
    clock, disk, check = SettableClock(), FailingDisk(), Check()
    failures, dropped = SPOOL_FAILURES.labels(error="ENOSPC"), value_of(TICKS_DROPPED)
    before = value_of(failures)
    send_queue = send_queue_of(
        spool_in(tmp_path), disk=disk, clock=clock, check=check, max_ticks=10
    )
    spilling = asyncio.create_task(send_queue.run())
    await asyncio.sleep(0)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    await put(send_queue, clock, *range(12))
    assert value_of(failures) > before
    assert (check.has_failed, usable_in(tmp_path)) == (True, 0)
    assert check.detail == "samples can wait in memory only: [Errno 28] No space left on device"
    assert (send_queue.bundles_in_memory, value_of(TICKS_DROPPED) - dropped) == (10, 2)
    disk.error = None
    await put(send_queue, clock, 12)
    assert (send_queue.bundles_in_memory, usable_in(tmp_path)) == (0, 1)
    assert check.detail == "10 samples on disk"
    assert await take_all(send_queue, 10) == list(range(3, 13))
    spilling.cancel()


async def test_a_disabled_spool_has_no_series_that_an_alert_could_take_for_a_broken_one() -> None:
    SPOOL_USABLE.clear()
    check = Check()
    send_queue, clock = send_queue_of(None, check=check), SettableClock()
    await put(send_queue, clock, *range(20))
    assert (check.is_ok, check.detail) == (True, "off")
    assert [one.samples for one in SPOOL_USABLE.collect()] == [[]]


async def test_bundles_on_the_disk_are_sent_first_even_if_the_disk_accepts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, clock = spool_in(tmp_path), SettableClock()
    send_queue = send_queue_of(spool, clock=clock)
    spilling = asyncio.create_task(send_queue.run())
    await put(send_queue, clock, *range(6))
    assert send_queue.is_on_disk

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool, "append", refuse)
    await put(send_queue, clock, *range(6, 12))
    assert await take_all(send_queue, 12) == list(range(12))
    spilling.cancel()


async def test_nothing_overtakes_bundles_on_a_disk_that_temporarily_cannot_be_read(
    tmp_path: Path,
) -> None:
    disk, clock, check = FlakyDisk(), SettableClock(), Check()
    spool = spool_in(tmp_path, disk=disk)
    send_queue = send_queue_of(spool, clock=clock, check=check, wait_seconds=4)
    spilling = asyncio.create_task(send_queue.run())
    await put(send_queue, clock, *range(7))
    taking = asyncio.create_task(take_all(send_queue, 30))
    with disk.failing():
        await put(send_queue, clock, *range(7, 20))
        assert not taking.done()
        # A read and a write, each every four seconds.
        assert disk.attempts <= 2 * (1 + 13 // 4)
        assert "disk I/O error" in check.detail
        assert (check.has_failed, usable_in(tmp_path)) == (True, 0)
    await put(send_queue, clock, *range(20, 30))
    assert await taking == list(range(30))
    await put(send_queue, clock, 30)
    assert await take_all(send_queue, 1) == [30]
    assert (check.is_ok, usable_in(tmp_path)) == (True, 1)
    spilling.cancel()


async def test_a_failed_disk_is_tried_again_even_if_nothing_waits(tmp_path: Path) -> None:
    clock, disk, check = SettableClock(), FailingDisk(), Check()
    send_queue = send_queue_of(spool_in(tmp_path), disk=disk, clock=clock, check=check)
    spilling = asyncio.create_task(send_queue.run())
    await asyncio.sleep(0)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    await put(send_queue, clock, *range(6))
    assert check.has_failed
    assert await take_all(send_queue, 6) == list(range(6))
    disk.error = None
    await put(send_queue, clock, 6)
    assert await take_all(send_queue, 1) == [6]
    assert check.is_ok
    spilling.cancel()


async def test_a_full_disk_is_reported_while_everything_is_sent(tmp_path: Path) -> None:
    clock, check = SettableClock(), Check()
    spool = spool_in(tmp_path, min_free_bytes=2**60)
    send_queue = send_queue_of(spool, clock=clock, check=check)
    spilling = asyncio.create_task(send_queue.run())
    await put(send_queue, clock, 0)
    assert await take_all(send_queue, 1) == [0]
    assert (check.has_failed, usable_in(tmp_path)) == (True, 0)
    assert "less than spool.min_free_bytes" in check.detail
    spilling.cancel()


async def test_while_everything_is_sent_the_free_space_is_checked_once_a_minute(
    tmp_path: Path,
) -> None:
    clock, disk, check = SettableClock(), FailingDisk(), Check()
    spool = spool_in(tmp_path)
    send_queue = send_queue_of(spool, disk=disk, clock=clock, check=check)
    spilling = asyncio.create_task(send_queue.run())
    failed_at = []
    for second in range(1, 181):
        disk.error = OSError(errno.ENOSPC, "full") if 30 <= second < 90 else None
        await put(send_queue, clock, second)
        assert await take_all(send_queue, 1) == [second]
        if check.has_failed:
            failed_at.append(second)
    assert failed_at == list(range(61, 90))
    assert usable_in(tmp_path) == 1
    spilling.cancel()


async def test_an_unusable_directory_is_reported_and_memory_is_used(tmp_path: Path) -> None:
    check, clock = Check(), SettableClock()
    send_queue = send_queue_of(spool_in(tmp_path / "absent"), check=check, clock=clock)
    await put(send_queue, clock, 0)
    assert await take_all(send_queue, 1) == [0]
    assert check.has_failed
    assert "no such directory" in check.detail


@pytest.mark.parametrize("error", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY])
async def test_nothing_overtakes_bundles_that_may_be_in_a_directory_that_cannot_be_opened(
    tmp_path: Path, error: int
) -> None:
    left_behind(tmp_path, 0, 1)
    clock, check, up, disk = SettableClock(), Check(), Uptime(1000), FlakyDisk()
    send_queue = send_queue_of(
        spool_in(tmp_path, up_seconds=up, disk=disk), clock=clock, check=check, max_ticks=5
    )
    before = value_of(TICKS_DROPPED)
    with disk.failing(error):
        taking = asyncio.create_task(take_all(send_queue, 7))
        for number in range(2, 9):
            await put(send_queue, clock, number)
            up.seconds += 1
        assert not taking.done()
        assert not send_queue.is_empty
        assert "cannot read samples on disk, newer ones wait" in check.detail
        assert value_of(TICKS_DROPPED) - before == 2
    await put(send_queue, clock, 9)
    assert await taking == [0, 1, 5, 6, 7, 8, 9]
    assert check.is_ok


async def test_after_a_minute_a_directory_that_cannot_be_opened_is_ignored_and_later_counted(
    tmp_path: Path,
) -> None:
    left_behind(tmp_path, 0, 1)
    clock, check, up, disk = SettableClock(), Check(), Uptime(1000), FlakyDisk()
    spool = spool_in(tmp_path, up_seconds=up, disk=disk)
    send_queue = send_queue_of(spool, clock=clock, check=check)
    late = SPOOL_DROPPED.labels(reason="late")
    before = value_of(late)
    taking = asyncio.create_task(take_all(send_queue, 61))
    with disk.failing(sqlite3.SQLITE_BUSY):
        for number in range(2, 62):
            await put(send_queue, clock, number)
            up.seconds += 2
        assert not taking.done()
        await put(send_queue, clock, 62)
        assert await taking == list(range(2, 63))
        assert check.detail.startswith("samples can wait in memory only: ")
        await put(send_queue, clock, 63)
        assert await take_all(send_queue, 1) == [63]
    assert value_of(late) == before
    await put(send_queue, clock, 64)
    assert await take_all(send_queue, 1) == [64]
    assert (value_of(late) - before, value_of(SPOOL_TICKS), check.is_ok) == (2, 0, True)


def left_behind(folder: Path, *numbers: int) -> None:
    """Leave bundles behind, as an earlier agent would."""
    before = spool_in(folder)
    before.append([bundle_of(number) for number in numbers])
    before.close()


async def test_without_a_spool_only_memory_is_used() -> None:
    check = Check()
    send_queue, clock = send_queue_of(None, check=check), SettableClock()
    await put(send_queue, clock, *range(10))
    await send_queue.spill_all()
    assert (check.is_ok, check.detail, send_queue.bundles_in_memory) == (True, "off", 10)


async def test_at_shutdown_unsent_bundles_are_written_to_the_disk_in_order(tmp_path: Path) -> None:
    send_queue, clock = send_queue_of(spool_in(tmp_path)), SettableClock()
    await put(send_queue, clock, 0, 1, 2)
    assert len(await send_queue.take(max_bundles=2)) == 2
    await send_queue.spill_all()
    await send_queue.close()
    assert await take_all(send_queue_of(spool_in(tmp_path)), 3) == [0, 1, 2]


async def test_a_hanging_disk_is_abandoned_and_the_bundles_on_it_are_counted(
    tmp_path: Path,
) -> None:
    spool, clock, check = spool_in(tmp_path), SettableClock(), Check()
    spool.append([bundle_of(0)])
    hung = SPOOL_DROPPED.labels(reason="hung")
    before = value_of(hung)
    send_queue = send_queue_of(
        spool, clock=clock, check=check, disk=IoThread(hung_after_seconds=0.05)
    )
    answer = threading.Event()
    spool.read = lambda *, max_bundles: answer.wait(HANG_SECONDS) and None  # type: ignore[method-assign, assignment, return-value]  # it hangs
    await put(send_queue, clock, 1, 2)
    assert await take_all(send_queue, 2) == [1, 2]
    answer.set()
    assert value_of(hung) - before == 1
    assert check.detail == "samples can wait in memory only: [Errno 110] no answer within 0.05 s"
    await send_queue.close()


async def test_a_disk_that_returns_a_timeout_error_does_not_count_as_hanging() -> None:
    disk = IoThread()

    def work() -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(TimeoutError):
        await disk.run(work)
    disk.close()


async def test_the_event_loop_continues_while_the_disk_is_slow(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    written = threading.Event()
    truth = spool.append

    def write_slowly(*bundles: object) -> object:
        assert written.wait(HANG_SECONDS)
        return truth(*bundles)  # type: ignore[arg-type]  # passed on

    spool.append = write_slowly  # type: ignore[method-assign, assignment]  # it waits for the loop
    send_queue = send_queue_of(spool, disk=IoThread())
    send_queue.put(bundle_of(0))
    keeping = asyncio.create_task(send_queue.spill_all())
    await asyncio.sleep(0)
    send_queue.put(bundle_of(1))
    written.set()
    await keeping
    await send_queue.close()
    assert await take_all(send_queue_of(spool_in(tmp_path)), 2) == [0, 1]


async def test_a_database_in_use_is_closed_after_its_call_returns(tmp_path: Path) -> None:
    is_written, may_end = threading.Event(), threading.Event()

    def write_slowly() -> int:
        is_written.set()
        return may_end.wait(HANG_SECONDS)

    class SlowDisk(FlakyDisk):
        @override
        def connect(self, file: Path) -> sqlite3.Connection:
            database = super().connect(file)
            database.create_function("write_slowly", 0, write_slowly)
            database.executescript(
                "CREATE TABLE IF NOT EXISTS frames (id INTEGER PRIMARY KEY, boot_id, spooled_ms,"
                " oldest_ms, bundles, size_bytes, crc32, body);"
                "CREATE TEMP TRIGGER slow BEFORE INSERT ON frames BEGIN SELECT write_slowly(); END"
            )
            return database

    send_queue = send_queue_of(spool_in(tmp_path, disk=SlowDisk()), disk=IoThread())
    send_queue.put(bundle_of(0))
    spilling = asyncio.create_task(send_queue.spill_all())
    await asyncio.to_thread(is_written.wait, HANG_SECONDS)
    spilling.cancel()
    closing = asyncio.create_task(send_queue.close())
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert await take_all(send_queue_of(spool_in(tmp_path)), 1) == [0]


async def test_a_burst_goes_to_the_disk_before_memory_is_full(tmp_path: Path) -> None:
    send_queue = send_queue_of(spool_in(tmp_path), max_ticks=20)
    dropped = value_of(TICKS_DROPPED)
    spilling = asyncio.create_task(send_queue.run())
    for number in range(100):
        send_queue.put(bundle_of(number))
        if number % 5 == 0:
            await asyncio.sleep(0)
    assert value_of(TICKS_DROPPED) == dropped
    assert await take_all(send_queue, 100) == list(range(100))
    spilling.cancel()


@pytest.mark.parametrize("fails_at", ["opening", "writing"])
async def test_at_shutdown_a_failed_disk_is_tried_once_more_without_a_wait(
    tmp_path: Path, fails_at: str
) -> None:
    disk, clock = FailingDisk(), SettableClock()
    send_queue = send_queue_of(spool_in(tmp_path), disk=disk, clock=clock, wait_seconds=1000)
    if fails_at == "opening":
        disk.error = OSError(errno.EIO, "no disk")
    spilling = asyncio.create_task(send_queue.run())
    await asyncio.sleep(0)
    disk.error = OSError(errno.EIO, "no disk")
    await put(send_queue, clock, *range(9))
    spilling.cancel()
    disk.error = None

    await send_queue.spill_all()
    await send_queue.close()

    assert send_queue.bundles_in_memory == 0
    left = spool_in(tmp_path)
    left.open()
    assert left.bundles == 9

"""A disk that fails, a database that is damaged or in use, a directory that is missing."""

import errno
import shutil
import sqlite3
import stat
import zlib
from pathlib import Path

import cramjam
import msgspec
import pytest
from structlog.testing import capture_logs

from gpuledger.keys import NodeId
from gpuledger_agent.metrics import SPOOL_FILES_SET_ASIDE
from gpuledger_agent.publish.spool import SET_ASIDE_NAME, Spool
from tests.errors import has_errno, has_words
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    FlakyDisk,
    Uptime,
    database_in,
    drain,
    dropped,
    fill,
    reopened,
    settings_in,
    spool_in,
)

OTHER = bytes(cramjam.zstd.compress(msgspec.msgpack.encode([{"topic": "x"}])))


def test_the_directory_is_private(tmp_path: Path) -> None:
    fill(spool_in(tmp_path), 1)
    assert stat.S_IMODE(database_in(tmp_path).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (sqlite3.SQLITE_IOERR, errno.EIO),
        (sqlite3.SQLITE_IOERR | (1 << 8), errno.EIO),  # an extended code
        (sqlite3.SQLITE_FULL, errno.ENOSPC),
        (sqlite3.SQLITE_READONLY, errno.EROFS),
        (sqlite3.SQLITE_NOMEM, errno.ENOMEM),
    ],
)
def test_a_temporary_disk_failure_loses_nothing(tmp_path: Path, code: int, error: int) -> None:
    before, disk = dropped("damaged"), FlakyDisk()
    spool = spool_in(tmp_path, disk=disk)
    fill(spool, *range(50))
    with disk.failing(code):
        with pytest.raises(OSError, check=has_errno(error)):
            spool.read(max_bundles=60)
        with pytest.raises(OSError, check=has_errno(error)):
            fill(spool, 50)
    fill(spool, 51)
    assert drain(spool) == [*range(50), 51]
    assert dropped("damaged") == before


def test_frames_that_cannot_be_deleted_are_sent_again_by_the_next_process(tmp_path: Path) -> None:
    disk = FlakyDisk()
    spool = spool_in(tmp_path, disk=disk)
    fill(spool, 1, 2)
    found = spool.read(max_bundles=1)
    assert found
    with disk.failing():
        spool.ack(found[1])
    assert drain(reopened(spool, tmp_path)) == [1, 2]


def test_sent_bundles_free_their_space_on_a_full_disk(tmp_path: Path) -> None:
    disk = FlakyDisk()
    spool = spool_in(tmp_path, disk=disk)
    fill(spool, 1, 2)
    found = spool.read(max_bundles=60)
    assert found
    with disk.failing(sqlite3.SQLITE_FULL), pytest.raises(OSError, check=has_errno(errno.ENOSPC)):
        spool.ack(found[1])  # there is no room for a new database either
    assert list(database_in(tmp_path).parent.iterdir()) == []
    fill(spool, 3)
    assert drain(spool) == [3]


def test_opening_a_database_needs_no_space_on_a_full_disk(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    fill(spool_in(before), 1, 2)
    shutil.copytree(before, after)
    written = {file: file.read_bytes() for file in database_in(after).parent.iterdir()}
    spool = spool_in(after)
    spool.open()
    assert {file: file.read_bytes() for file in written} == written
    assert drain(spool) == [1, 2]


def test_a_disk_that_fails_for_a_minute_is_abandoned_and_its_bundles_are_counted(
    tmp_path: Path,
) -> None:
    before, clock, disk = dropped("damaged"), Uptime(1000), FlakyDisk()
    spool = spool_in(tmp_path, up_seconds=clock, disk=disk)
    fill(spool, *range(30))
    with disk.failing():
        for second in (1000, 1030, 1059):
            clock.seconds = second
            with pytest.raises(OSError, check=has_errno(errno.EIO)):
                spool.read(max_bundles=60)
        assert dropped("damaged") == before
        clock.seconds = 1060
        with pytest.raises(OSError, check=has_errno(errno.EIO)):
            spool.read(max_bundles=60)
    assert dropped("damaged") - before == 30
    fill(spool, 30)
    assert drain(spool) == [30]


def test_a_disk_that_fails_at_the_start_may_have_bundles_for_two_minutes(tmp_path: Path) -> None:
    clock, disk = Uptime(1000), FlakyDisk()
    fill(before := spool_in(tmp_path), 1, 2)
    before.close()
    spool = spool_in(tmp_path, up_seconds=clock, disk=disk)
    with disk.failing(sqlite3.SQLITE_BUSY):
        with pytest.raises(BlockingIOError):
            spool.open()
        waits = []
        for second in (1000, 1119, 1120):
            clock.seconds = second
            waits.append(not spool.is_empty)
    assert waits == [True, True, False]
    clock.seconds = 1010
    assert drain(spool) == [1, 2]


@pytest.mark.parametrize("content", [b"not a database" * 400, None])
def test_a_damaged_database_is_renamed_counted_and_replaced(
    tmp_path: Path, content: bytes | None
) -> None:
    spool, before = spool_in(tmp_path), value_of(SPOOL_FILES_SET_ASIDE)
    fill(spool, *range(30), size_bytes=4000)
    spool.close()
    file = database_in(tmp_path)
    size_bytes = file.stat().st_size
    file.write_bytes(content or file.read_bytes()[:4096] + bytes(size_bytes - 4096))
    with capture_logs() as logs:
        again = spool_in(tmp_path)
        fill(again, 30)
        assert drain(again) == [30]
    assert value_of(SPOOL_FILES_SET_ASIDE) - before == 1
    assert [log["renamed_to"] for log in logs if log["event"] == "spool_damaged"] == [
        SET_ASIDE_NAME
    ]
    assert file.with_name(SET_ASIDE_NAME).exists()


@pytest.mark.parametrize(
    ("body", "crc32"),
    [(OTHER, 0), (OTHER, zlib.crc32(OTHER)), (b"?", zlib.crc32(b"?"))],
    ids=["damaged", "with other bundles", "compressed differently"],
)
def test_an_unreadable_frame_is_dropped_and_counted_and_the_others_are_sent(
    tmp_path: Path, body: bytes, crc32: int
) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    fill(spool, 1, 2, 3)
    spool.close()
    with sqlite3.connect(database_in(tmp_path)) as database:
        database.execute("UPDATE frames SET body = ?, crc32 = ? WHERE id = 2", (body, crc32))
    database.close()
    assert drain(spool_in(tmp_path)) == [1, 3]
    assert dropped("damaged") - before == 1


def test_a_position_from_a_replaced_database_is_ignored_by_the_new_one(tmp_path: Path) -> None:
    disk, clock = FlakyDisk(), Uptime(1000)
    spool = spool_in(tmp_path, disk=disk, up_seconds=clock)
    fill(spool, 1)
    _, position = spool.read(max_bundles=9) or pytest.fail("the spool is empty")
    with disk.failing(sqlite3.SQLITE_CORRUPT), pytest.raises(OSError, check=has_errno(errno.EIO)):
        fill(spool, 2)
    fill(spool, 3)

    spool.ack(position)
    assert drain(spool) == [3]


def test_a_database_in_use_is_rejected_with_its_reason(tmp_path: Path) -> None:
    fill(spool := spool_in(tmp_path), 1)
    with pytest.raises(BlockingIOError, check=has_words("another agent")):
        spool_in(tmp_path).open()
    assert drain(spool) == [1]


def test_a_missing_directory_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spool_in(tmp_path / "absent").open()


def test_a_full_disk_is_reported_as_such_and_never_as_a_damaged_database(tmp_path: Path) -> None:
    before, aside = dropped("damaged"), value_of(SPOOL_FILES_SET_ASIDE)
    clock, disk = Uptime(1000), FlakyDisk()
    spool = spool_in(tmp_path, up_seconds=clock, disk=disk)
    with disk.failing(sqlite3.SQLITE_FULL), capture_logs() as logs:
        for second in (1000, 1059, 1061, 4000):
            clock.seconds = second
            with pytest.raises(OSError, check=has_words("no space left")) as caught:
                spool.open()
            assert caught.value.errno == errno.ENOSPC
    assert (dropped("damaged"), value_of(SPOOL_FILES_SET_ASIDE)) == (before, aside)
    assert logs == []
    fill(spool, 1)
    assert drain(spool) == [1]


def test_the_reserve_of_free_space_is_not_used(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, min_free_bytes=2**60)
    with pytest.raises(OSError, check=has_words("no space left", "min_free_bytes")) as caught:
        fill(spool, 1)
    assert caught.value.errno == errno.ENOSPC
    assert spool.is_empty


@pytest.mark.parametrize(
    ("node", "name"),
    [("a/../b", "default_a%2F..%2Fb"), ("..", "default_.."), ("n.example", "default_n.example")],
)
def test_each_node_has_its_own_directory_and_no_name_can_leave_it(
    tmp_path: Path, node: str, name: str
) -> None:
    Spool(
        settings_in(tmp_path), node=NodeId("default", node), boot_id="b", boottime_ns=lambda: 0
    ).open()
    assert [path.name for path in tmp_path.iterdir()] == [name]

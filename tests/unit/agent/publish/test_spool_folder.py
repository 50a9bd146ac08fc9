"""A folder or a file that cannot be read, is gone, is full or is somebody else's."""

import errno
import os
import shutil
import stat
from itertools import chain
from pathlib import Path

import pytest

from gpuledger.keys import NodeId
from gpuledger_agent.metrics import (
    SPOOL_TICKS,
)
from gpuledger_agent.publish.spool import Spool
from tests.errors import has_errno, has_words
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    Uptime,
    bundle_of,
    drain,
    dropped,
    files_in,
    fill,
    fill_frames,
    reopened,
    settings_in,
    spool_in,
    unreadable,
)


def test_files_are_the_agents_alone(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    (file,) = files_in(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_file_that_cannot_be_read_for_a_moment_loses_nothing(tmp_path: Path, error: int) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    fill(spool, *range(50))
    with unreadable(files_in(tmp_path)[0], error), pytest.raises(OSError, check=has_errno(error)):
        spool.read(max_bundles=60)
    assert (spool.bundles, len(files_in(tmp_path))) == (50, 1)
    assert drain(spool) == list(range(50))
    assert dropped("damaged") == before


def test_a_file_that_cannot_be_read_for_a_minute_is_given_up_and_the_next_one_read(
    tmp_path: Path,
) -> None:
    before, clock = dropped("damaged"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_bytes=20_000)
    bundles = ([bundle_of(number, size_bytes=64)] for number in range(30))
    files = [frame.file for frame in fill_frames(spool, tmp_path, *bundles)]
    in_first = files.count(files[0])
    with unreadable(files[0], errno.EIO):
        for second in (1000, 1030, 1059):
            clock.seconds = second
            with pytest.raises(OSError, check=has_errno(errno.EIO)):
                spool.read(max_bundles=60)
        clock.seconds = 1060
        assert drain(spool) == list(range(in_first, 30))
    assert dropped("damaged") - before == in_first
    assert not files[0].exists()


def test_a_minute_without_tries_gives_no_file_up(tmp_path: Path) -> None:
    clock = Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock)
    fill(spool, 1, 2)
    with unreadable(files_in(tmp_path)[0], errno.EMFILE):
        for second in (1000, 1070, 1100, 1129):
            clock.seconds = second
            with pytest.raises(OSError, check=has_errno(errno.EMFILE)):
                spool.read(max_bundles=60)
    assert drain(spool) == [1, 2]


def test_a_file_that_cannot_be_read_at_the_start_waits_likewise(tmp_path: Path) -> None:
    before, clock = spool_in(tmp_path), Uptime(1000)
    fill(before, 1, 2)
    before.close()
    spool = spool_in(tmp_path, up_seconds=clock)
    with unreadable(files_in(tmp_path)[0], errno.EMFILE):
        with pytest.raises(OSError, check=has_errno(errno.EMFILE)):
            spool.open()
        waits = []
        for second in (1000, 1119, 1120):  # not for ever, as nobody may try again
            clock.seconds = second
            waits.append(not spool.is_empty)
    assert waits == [True, True, False]
    clock.seconds = 1010
    assert drain(spool) == [1, 2]


def test_a_file_that_cannot_be_read_for_a_minute_at_the_start_is_left_alone(tmp_path: Path) -> None:
    before, clock = spool_in(tmp_path), Uptime(1000)
    fill(before, 1, 2)
    before.close()
    spool = spool_in(tmp_path, up_seconds=clock)
    with unreadable(files_in(tmp_path)[0], errno.EIO):
        for second in (1000, 1030):
            clock.seconds = second
            with pytest.raises(OSError, check=has_errno(errno.EIO)):
                spool.open()
        clock.seconds = 1060
        fill(spool, 3)
        assert drain(spool) == [3]
    assert len(files_in(tmp_path)) == 1


def test_files_that_somebody_removed_are_counted_and_what_comes_later_is_kept(
    tmp_path: Path,
) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path, max_bytes=20_000)
    fill(spool, *range(30), size_bytes=64)
    for path in files_in(tmp_path):
        path.unlink()
    fill(spool, 30)
    assert (spool.bundles, value_of(SPOOL_TICKS)) == (1, 1)
    assert dropped("damaged") - before == 30
    fill(spool, 31)
    files_in(tmp_path)[0].unlink()
    assert (drain(spool), spool.bundles) == ([], 0)
    assert dropped("damaged") - before == 32


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_folder_that_somebody_removed_is_begun_anew(
    tmp_path: Path, *, is_made_again: bool
) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    fill(spool, 1, 2)
    found = spool.read(max_bundles=1)
    assert found
    spool.set_in_flight(found[1])
    shutil.rmtree(tmp_path / "default_node-1")
    if is_made_again:
        (tmp_path / "default_node-1").mkdir()
    fill(spool, 3)
    spool.ack(found[1])
    assert dropped("damaged") - before == 1
    assert drain(spool) == [3]
    with pytest.raises(BlockingIOError):
        spool_in(tmp_path).open()


def test_a_place_in_a_folder_that_was_removed_is_none_in_the_one_made_anew(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    _, position = spool.read(max_bundles=9) or pytest.fail("nothing is there")
    shutil.rmtree(files_in(tmp_path)[0].parent)
    fill(spool, 2)

    spool.ack(position)
    assert drain(spool) == [2]


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    tmp_path.rename(tmp_path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        fill(spool, 2)
    assert spool.is_empty
    tmp_path.mkdir()
    fill(spool, 3)
    assert drain(spool) == [3]


def test_a_folder_in_use_is_refused_with_its_reason(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    with pytest.raises(BlockingIOError):
        spool_in(tmp_path).open()


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        spool_in(tmp_path / "absent").open()


def test_no_space_is_taken_that_is_left_to_others(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, min_free_bytes=2**60)
    with pytest.raises(OSError, check=has_words("min_free_bytes")) as caught:
        fill(spool, 1)
    assert caught.value.errno == errno.ENOSPC
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("written_bytes", [0, 7])
def test_a_disk_that_refuses_in_mid_write_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_bytes: int
) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    truth, calls = os.pwrite, chain([written_bytes] if written_bytes else [], [-1])

    def refuse(file: int, data: bytes, at: int) -> int:
        if (count := next(calls)) < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return truth(file, data[:count], at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, check=has_errno(errno.ENOSPC)):
            fill(spool, 2)
    fill(spool, 3)
    assert drain(reopened(spool, tmp_path)) == [1, 3]


def test_attempts_on_a_full_disk_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_in(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        for _ in range(3):
            with pytest.raises(OSError, check=has_errno(errno.ENOSPC)):
                fill(spool, 1)
    assert files_in(tmp_path) == []
    fill(spool, 1)
    assert drain(spool) == [1]


def test_nodes_do_not_find_what_others_left(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["default_node-1"]


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("a/../b", "default_a%2F..%2Fb"),
        ("..", "default_.."),
        ("", "default_"),
        ("n.example", "default_n.example"),
    ],
)
def test_no_node_name_leads_out_of_the_folder(tmp_path: Path, node: str, name: str) -> None:
    Spool(
        settings_in(tmp_path), node=NodeId("default", node), boot_id="b", boottime_ns=lambda: 0
    ).open()
    assert [path.name for path in tmp_path.iterdir()] == [name]

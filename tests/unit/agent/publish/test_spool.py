"""The spool keeps the order, its bounds, and whatever a crash left whole."""

import errno
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import cramjam
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.metrics import (
    QUEUE_TICKS,
    SPOOL_BYTES,
    SPOOL_DROPPED,
    SPOOL_FILES_SET_ASIDE,
    SPOOL_OLDEST_SECONDS,
    SPOOL_TICKS,
    SPOOL_TORN,
    SPOOL_WRITTEN,
    TICKS_DROPPED,
)
from agent.publish.spool import Spool
from agent.publish.spool_file import START, DamagedError, pack_frame, unpack_frame
from gpuledger.bus.protocol import Message
from gpuledger.topics import INCIDENTS
from tests.unit.agent.publish.builders import (
    BOOT,
    NODE,
    NOW_SECONDS,
    Uptime,
    files_in,
    number_of,
    parcel_of,
    spool_in,
    unreadable,
)

EARLIER_BOOT = "0c1de0c8-9d0f-4f7a-8ad8-0f0c55f5a6b1"


def fill(spool: Spool, *numbers: int, size_bytes: int = 0) -> None:
    for number in numbers:
        spool.append([parcel_of(number, size_bytes=size_bytes)])


def drain(spool: Spool) -> list[int]:
    """Read and forget everything, as a publisher does."""
    found: list[int] = []
    while reading := spool.read(max_bundles=60):
        bundles, position = reading
        found += map(number_of, bundles)
        spool.ack(position)
    return found


def reopened(
    spool: Spool, folder: Path, *, up_seconds: "float | Uptime" = 0, **settings: float
) -> Spool:
    """Return what the next process finds; the lock goes with the one before."""
    spool.close()
    other = spool_in(folder, up_seconds=up_seconds, boot_id=BOOT, **settings)
    other.open()
    return other


def dropped(reason: str) -> float:
    return float(SPOOL_DROPPED.labels(reason=reason)._value.get())


def test_a_frame_gives_back_what_was_put_in() -> None:
    bundles = [parcel_of(number) for number in range(5)]
    assert unpack_frame(pack_frame(bundles, spooled_ms=7)) == bundles


@given(at=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
def test_a_frame_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    frame = bytearray(pack_frame([parcel_of(1), parcel_of(2)], spooled_ms=7))
    frame[at % len(frame)] ^= flip
    if at % len(frame) >= 4:  # the length is the file's business
        with pytest.raises(DamagedError):
            unpack_frame(bytes(frame))


def test_what_was_written_is_read_in_its_order_and_nothing_is_left(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(100))
    assert drain(spool) == list(range(100))
    assert spool.is_empty
    assert files_in(tmp_path) == []


def test_reading_gives_at_most_what_is_asked_for_or_one_frame(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.append([parcel_of(number) for number in range(5)])
    spool.append([parcel_of(number) for number in range(5, 9)])
    found = spool.read(max_bundles=3)
    assert found
    assert [number_of(bundle) for bundle in found[0]] == [0, 1, 2, 3, 4]
    found = spool.read(max_bundles=9)
    assert found
    assert len(found[0]) == 9


def test_large_ticks_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(9), size_bytes=400_000)
    found = spool.read(max_bundles=60)
    assert found
    assert [number_of(bundle) for bundle in found[0]] == [0, 1]
    assert drain(spool) == list(range(9))


def test_what_was_read_and_not_forgotten_is_read_again(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1, 2, 3)
    assert spool.read(max_bundles=2) == spool.read(max_bundles=2)


def test_the_next_process_goes_on_where_the_last_one_was_killed(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(10))
    found = spool.read(max_bundles=4)
    assert found
    spool.ack(found[1])
    again = reopened(spool, tmp_path)
    fill(again, 10)
    assert drain(again) == [4, 5, 6, 7, 8, 9, 10]


def test_files_are_the_agents_alone(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    (file,) = files_in(tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_full_spool_drops_its_oldest_and_counts_it(tmp_path: Path) -> None:
    before = dropped("bytes")
    spool = spool_in(tmp_path, max_bytes=16_000)
    for number in range(200):
        spool.append([parcel_of(number, size_bytes=64)])
        assert sum(file.stat().st_size for file in files_in(tmp_path)) <= 16_000
    assert SPOOL_BYTES._value.get() > 12_000
    kept = drain(spool)
    assert kept == list(range(200 - len(kept), 200))
    assert dropped("bytes") - before == 200 - len(kept)


def test_the_oldest_that_waits_is_the_oldest_parcel_of_the_oldest_frame(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.append([parcel_of(number) for number in (3, 4, 5)])
    spool.append([parcel_of(6)])
    assert SPOOL_OLDEST_SECONDS._value.get() == NOW_SECONDS + 3
    reopened(spool, tmp_path)
    assert SPOOL_OLDEST_SECONDS._value.get() == NOW_SECONDS + 3


def test_what_has_lain_there_for_too_long_is_dropped_and_counted(tmp_path: Path) -> None:
    before, clock = dropped("age"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_age_seconds=10)
    for number, second in enumerate((1000, 1009, 1010, 1019)):
        clock.seconds = second
        fill(spool, number)
    clock.seconds = 1020
    assert drain(spool) == [2, 3]
    assert dropped("age") - before == 2


@pytest.mark.parametrize("leap_seconds", [240, 3600, 365 * 86_400, -3600, -NOW_SECONDS])
def test_whatever_time_ticks_are_stamped_with_they_age_by_the_time_since_boot(
    tmp_path: Path, leap_seconds: int
) -> None:
    before, clock = dropped("age"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_age_seconds=3600)
    for second in range(200):
        clock.seconds = 1000 + second
        leapt = leap_seconds if 195 <= second < 200 else 0
        fill(spool, second + leapt)
    found = drain(spool)
    assert [one for one in found if 0 <= one < 195] == list(range(195))
    assert len(found) == 200
    assert dropped("age") == before


def test_the_next_process_of_a_boot_counts_the_age_on(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, up_seconds=1000)
    fill(spool, 1)
    spool.close()
    spool = spool_in(tmp_path, up_seconds=1900)
    fill(spool, 2)
    assert drain(reopened(spool, tmp_path, up_seconds=1905, max_age_seconds=900)) == [2]


def test_what_an_earlier_boot_left_is_at_least_as_old_as_this_one_and_no_older(
    tmp_path: Path,
) -> None:
    before, clock = dropped("age"), Uptime(0)
    spool = spool_in(tmp_path, boot_id=EARLIER_BOOT, up_seconds=86_400)
    fill(spool, 1)
    # Whenever that was, and whatever the clock shows after the reboot.
    again = reopened(spool, tmp_path, up_seconds=clock, max_age_seconds=60)
    clock.seconds = 60
    found = again.read(max_bundles=9)
    assert found is not None
    assert list(map(number_of, found[0])) == [1]
    clock.seconds = 61
    assert again.read(max_bundles=9) is None
    assert dropped("age") - before == 1


def test_a_spool_of_the_first_form_is_taken_over_and_ages_from_when_it_was_found(
    tmp_path: Path,
) -> None:
    clock = Uptime(1000)
    folder = tmp_path / "node-1"
    folder.mkdir()
    frames = [
        pack_frame([parcel_of(number)], spooled_ms=1000 * (NOW_SECONDS + number))
        for number in range(6)
    ]
    position = 24 + len(frames[0])
    head = b"gpuledger spool\1" + position.to_bytes(8, "little")
    (folder / "000000000003.spool").write_bytes(head + b"".join(frames) + b"torn")
    spool = spool_in(tmp_path, up_seconds=clock, max_age_seconds=60)
    spool.open()
    fill(spool, 6)
    clock.seconds = 1060
    found = spool.read(max_bundles=2)
    assert found is not None
    assert list(map(number_of, found[0])) == [1, 2]
    spool.ack(found[1])
    again = reopened(spool, tmp_path, up_seconds=clock, max_age_seconds=60)
    assert drain(again) == [3, 4, 5, 6]


def test_what_somebody_holds_is_not_counted_as_dropped(tmp_path: Path) -> None:
    before = dropped("bytes")
    spool = spool_in(tmp_path, max_bytes=2_000)
    fill(spool, 1)
    found = spool.read(max_bundles=1)
    assert found
    spool.set_in_flight(found[1])
    fill(spool, *range(2, 30))
    spool.ack(found[1])
    kept = drain(spool)
    assert dropped("bytes") - before == 28 - len(kept)


@given(cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_gives_the_frames_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = spool_in(folder)
    fill(spool, *range(10))
    (file,) = files_in(folder)
    ends = [frame.end for frame in spool._segments[0].frames]
    cut %= ends[-1] + 1
    torn = SPOOL_TORN._value.get()
    os.truncate(file, cut)
    again = reopened(spool, folder)
    whole = [number for number, end in enumerate(ends) if end <= cut]
    assert SPOOL_TORN._value.get() - torn == (cut not in (0, START, *ends))
    fill(again, 10)
    assert drain(again) == [*whole, 10]


def test_a_file_that_a_power_cut_left_full_of_zeros_ends_there(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1, 2)
    with files_in(tmp_path)[0].open("ab") as file:
        file.write(bytes(4096))
    again = reopened(spool, tmp_path)
    assert drain(again) == [1, 2]


def test_a_frame_with_a_broken_byte_is_lost_alone(tmp_path: Path) -> None:
    before = dropped("damaged")
    spool = spool_in(tmp_path, max_bytes=20_000)
    fill(spool, *range(30), size_bytes=64)
    first, second, *_ = spool._segments
    in_first = first.bundles
    with files_in(tmp_path)[1].open("r+b") as file:
        file.seek(second.frames[2].start + 30)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))
    again = reopened(spool, tmp_path, max_bytes=20_000)
    lost = in_first + 2
    assert drain(again) == [number for number in range(30) if number != lost]
    assert dropped("damaged") - before == 1


@given(frame=st.integers(0, 12), at=st.integers(min_value=0), flip=st.integers(1, 255))
def test_of_a_file_with_any_byte_changed_the_other_frames_are_sent_and_the_loss_is_told(
    tmp_path_factory: pytest.TempPathFactory, frame: int, at: int, flip: int
) -> None:
    before, torn = dropped("damaged"), SPOOL_TORN._value.get()
    folder = tmp_path_factory.mktemp("spool")
    spool = spool_in(folder)
    for number in range(14):
        spool.append([parcel_of(10 * number), parcel_of(10 * number + 1)])
    hit = spool._segments[0].frames[frame]
    change_byte(files_in(folder)[0], hit.start + at % (hit.end - hit.start), flip)
    with capture_logs() as logs:
        found = drain(reopened(spool, folder))
    whole = [number for number in range(14) if number != frame]
    assert found == [10 * number + second for number in whole for second in (0, 1)]
    assert dropped("damaged") - before >= 1
    assert SPOOL_TORN._value.get() == torn
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["spool_damaged"]


@pytest.mark.parametrize("at", range(16))
def test_a_file_whose_own_head_is_broken_gives_its_frames(tmp_path: Path, at: int) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(5))
    change_byte(files_in(tmp_path)[0], at, 255)
    assert drain(reopened(spool, tmp_path)) == list(range(5))


def change_byte(path: Path, at: int, flip: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= flip
    path.write_bytes(data)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_file_that_cannot_be_read_for_a_moment_loses_nothing(tmp_path: Path, error: int) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    fill(spool, *range(50))
    with unreadable(files_in(tmp_path)[0], error), pytest.raises(OSError, match=r"Errno"):
        spool.read(max_bundles=60)
    assert (spool.bundles, len(files_in(tmp_path))) == (50, 1)
    assert drain(spool) == list(range(50))
    assert dropped("damaged") == before


def test_a_file_that_cannot_be_read_for_a_minute_is_given_up_and_the_next_one_read(
    tmp_path: Path,
) -> None:
    before, clock = dropped("damaged"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_bytes=20_000)
    fill(spool, *range(30), size_bytes=64)
    first, *_ = spool._segments
    in_first = first.bundles
    with unreadable(first.path, errno.EIO):
        for second in (1000, 1030, 1059):
            clock.seconds = second
            with pytest.raises(OSError, match="Input/output error"):
                spool.read(max_bundles=60)
        clock.seconds = 1060
        assert drain(spool) == list(range(in_first, 30))
    assert dropped("damaged") - before == in_first
    assert not first.path.exists()


def test_a_minute_without_tries_gives_no_file_up(tmp_path: Path) -> None:
    clock = Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock)
    fill(spool, 1, 2)
    with unreadable(files_in(tmp_path)[0], errno.EMFILE):
        for second in (1000, 1070, 1100, 1129):
            clock.seconds = second
            with pytest.raises(OSError, match="Too many open files"):
                spool.read(max_bundles=60)
    assert drain(spool) == [1, 2]


def test_a_file_that_cannot_be_read_at_the_start_waits_likewise(tmp_path: Path) -> None:
    before, clock = spool_in(tmp_path), Uptime(1000)
    fill(before, 1, 2)
    before.close()
    spool = spool_in(tmp_path, up_seconds=clock)
    with unreadable(files_in(tmp_path)[0], errno.EMFILE):
        with pytest.raises(OSError, match="Too many open files"):
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
            with pytest.raises(OSError, match="Input/output error"):
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
    assert (spool.bundles, SPOOL_TICKS._value.get()) == (1, 1)
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
    shutil.rmtree(tmp_path / "node-1")
    if is_made_again:
        (tmp_path / "node-1").mkdir()
    fill(spool, 3)
    spool.ack(found[1])
    assert dropped("damaged") - before == 1
    assert drain(spool) == [3]
    with pytest.raises(BlockingIOError, match="another agent uses it"):
        spool_in(tmp_path).open()


def test_a_place_in_a_folder_that_was_removed_is_none_in_the_one_made_anew(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    _, position = spool.read(max_bundles=9) or pytest.fail("nothing is there")
    shutil.rmtree(files_in(tmp_path)[0].parent)
    fill(spool, 2)

    spool.ack(position)
    assert drain(spool) == [2]


def test_what_is_too_old_is_dropped_also_while_nobody_reads(tmp_path: Path) -> None:
    up = Uptime(0)
    spool = spool_in(tmp_path, up_seconds=up, max_age_seconds=3600)
    fill(spool, 1)
    up.seconds = 3601
    fill(spool, 2)

    assert spool.bundles == 1
    assert drain(spool) == [2]


def test_what_is_told_to_be_damaged_is_what_is_counted_as_lost(tmp_path: Path) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    spool.append([parcel_of(number) for number in range(5)])
    fill(spool, 5)
    found = spool.read(max_bundles=5)
    assert found
    spool.set_in_flight(found[1])
    files_in(tmp_path)[0].unlink()
    with capture_logs() as logs:
        fill(spool, 6)
    assert dropped("damaged") - before == 1
    assert [log["count"] for log in logs if log["event"] == "spool_damaged"] == [1]


def test_a_folder_that_comes_back_is_used_again(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    tmp_path.rename(tmp_path.with_name("away"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        fill(spool, 2)
    assert spool.is_empty
    tmp_path.mkdir()
    fill(spool, 3)
    assert drain(spool) == [3]


# Each has a checksum that fits: another version may have written it, or a user who may write here.
UNREADABLE = [
    msgspec.msgpack.encode([[["topic", [b"key", b"value", 7]]]]).replace(b"topic", b"\xff" * 5),
    b"\x91" * 10_000,
    b"\xdd\xff\xff\xff\xff",
    b"",
    msgspec.msgpack.encode({"other": 1}),
]


@pytest.mark.parametrize("body", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_frame_that_holds_no_parcels_is_lost_alone(tmp_path: Path, body: bytes) -> None:
    before = dropped("damaged")
    spool = spool_in(tmp_path)
    fill(spool, 1)
    with files_in(tmp_path)[0].open("ab") as file:
        file.write(framed(body))
    again = reopened(spool, tmp_path)
    fill(again, 2)
    assert drain(again) == [1, 2]
    assert dropped("damaged") - before == 1


def framed(body: bytes) -> bytes:
    """Return a frame of one bundle with this body, compressed, and the checksum that it needs."""
    packed = bytes(cramjam.zstd.compress(body))
    rest = struct.pack("<Iqq", 1, 0, 0) + packed
    return struct.pack("<II", len(packed), zlib.crc32(rest)) + rest


def test_a_file_of_something_else_is_put_away(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.open()
    (tmp_path / "node-1" / "000000000007.spool").write_bytes(b"something else" * 10)
    again = reopened(spool, tmp_path)
    fill(again, 1)
    assert drain(again) == [1]


def test_a_position_that_is_no_border_is_not_believed(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1, 2)
    with files_in(tmp_path)[0].open("r+b") as file:
        file.seek(16)
        file.write((START + 5).to_bytes(8, "little"))
    assert drain(reopened(spool, tmp_path)) == [1, 2]


def test_a_folder_in_use_is_refused_with_its_reason(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    with pytest.raises(BlockingIOError, match="another agent uses it"):
        spool_in(tmp_path).open()


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        spool_in(tmp_path / "absent").open()


def test_no_space_is_taken_that_is_left_to_others(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, min_free_bytes=2**60)
    with pytest.raises(OSError, match="min_free_bytes") as caught:
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
        with pytest.raises(OSError, match="No space left"):
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
            with pytest.raises(OSError, match="No space left"):
                fill(spool, 1)
    assert files_in(tmp_path) == []
    fill(spool, 1)
    assert drain(spool) == [1]


def test_nodes_do_not_find_what_others_left(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["node-1"]


@pytest.mark.parametrize(
    ("node", "name"),
    [("a/../b", "a%2F..%2Fb"), ("..", "%.."), ("", "%"), ("n.example", "n.example")],
)
def test_no_node_name_leads_out_of_the_folder(tmp_path: Path, node: str, name: str) -> None:
    settings = spool_in(tmp_path)._settings
    Spool(settings, node=node, boot_id="b", boottime_ns=lambda: 0).open()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_counts_incidents_and_inventories_beside_ticks_says_so(tmp_path: Path) -> None:
    incident = Message(key=b"node-1", value=b"xid", timestamp_ms=1000 * NOW_SECONDS)
    spool, before = spool_in(tmp_path), written()
    spool.append([parcel_of(1), ((INCIDENTS.name, incident),), parcel_of(2)])
    assert written() - before == 3
    for metric in (SPOOL_WRITTEN, SPOOL_TICKS, SPOOL_DROPPED, QUEUE_TICKS, TICKS_DROPPED):
        (family,) = metric.collect()
        assert family.documentation.startswith("Ticks and other messages "), family.name


def written() -> float:
    (family,) = SPOOL_WRITTEN.collect()
    return next(one.value for one in family.samples if one.name.endswith("_total"))


HEAD_OF_NO_FRAME = struct.pack("<IIIqqI", 3_000_000, 0, 5, 0, 0, 0xFD2FB528)
FOREIGN = {
    "larger than any": lambda file: os.truncate(file, 3 * 2**30),
    "made-up heads": lambda file: file.write_bytes(
        b"gpuledger spool\2" + bytes(72) + HEAD_OF_NO_FRAME * 125_000
    ),
    "made-up heads without a file's own": lambda file: file.write_bytes(HEAD_OF_NO_FRAME * 125_000),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_no_spool_writes_is_set_aside_as_it_is_and_told(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    foreign = tmp_path / NODE / "000000000000.spool"
    foreign.touch()
    write(foreign)
    size_bytes, before = foreign.stat().st_size, SPOOL_FILES_SET_ASIDE._value.get()
    with capture_logs() as logs:
        again = reopened(spool, tmp_path)
    assert foreign.with_suffix(".foreign").stat().st_size == size_bytes
    assert SPOOL_FILES_SET_ASIDE._value.get() - before == 1
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["spool_file_renamed"]
    assert drain(again) == [1]


def test_a_spool_whose_scan_is_stopped_keeps_all_for_the_next_process(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1, 2)
    spool.close()
    ending = spool_in(tmp_path)
    ending.stop_scan()
    fill(ending, 3)
    assert not ending.is_empty
    assert ending.read(max_bundles=60) is None
    assert drain(reopened(ending, tmp_path)) == [1, 2, 3]

"""Whatever a crash or somebody else left: whole frames are sent, and what is lost is counted."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gpuledger_agent.metrics import (
    SPOOL_FILES_SET_ASIDE,
    SPOOL_TORN,
)
from gpuledger_agent.publish.spool import Spool
from gpuledger_agent.publish.spool_file import (
    HEAD_BYTES,
    START,
    DamagedError,
    pack_frame,
    unpack_frame,
)
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    NODE,
    Frame,
    bundle_of,
    change_byte,
    drain,
    dropped,
    files_in,
    fill,
    fill_frames,
    reopened,
    spool_in,
)


def test_a_frame_gives_back_what_was_put_in() -> None:
    bundles = [bundle_of(number) for number in range(5)]
    assert unpack_frame(pack_frame(bundles, spooled_ms=7)) == bundles


@given(at=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
def test_a_frame_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    frame = bytearray(pack_frame([bundle_of(1), bundle_of(2)], spooled_ms=7))
    frame[at % len(frame)] ^= flip
    if at % len(frame) >= 4:  # the length is the file's business
        with pytest.raises(DamagedError):
            unpack_frame(bytes(frame))


@given(cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_gives_the_frames_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = spool_in(folder)
    frames = fill_frames(spool, folder, *([bundle_of(number)] for number in range(10)))
    (file,) = files_in(folder)
    ends = [frame.end for frame in frames]
    cut %= ends[-1] + 1
    torn = value_of(SPOOL_TORN)
    os.truncate(file, cut)
    again = reopened(spool, folder)
    whole = [number for number, end in enumerate(ends) if end <= cut]
    assert value_of(SPOOL_TORN) - torn == (cut not in (0, START, *ends))
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
    bundles = ([bundle_of(number, size_bytes=64)] for number in range(30))
    frames = fill_frames(spool, tmp_path, *bundles)
    second = files_in(tmp_path)[1]
    lost = [frame.file for frame in frames].index(second) + 2
    change_byte(second, frames[lost].start + 30, 0xFF)
    again = reopened(spool, tmp_path, max_bytes=20_000)
    assert drain(again) == [number for number in range(30) if number != lost]
    assert dropped("damaged") - before == 1


# A length that reaches to the next frame's border.
@example(frame=0, at=0, flip=227)
@given(frame=st.integers(0, 12), at=st.integers(min_value=0), flip=st.integers(1, 255))
def test_of_a_file_with_any_byte_changed_the_other_frames_are_sent_and_the_loss_is_reported(
    tmp_path_factory: pytest.TempPathFactory, frame: int, at: int, flip: int
) -> None:
    before, torn = dropped("damaged"), value_of(SPOOL_TORN)
    folder = tmp_path_factory.mktemp("spool")
    spool = spool_in(folder)
    pairs = ([bundle_of(10 * number), bundle_of(10 * number + 1)] for number in range(14))
    hit = fill_frames(spool, folder, *pairs)[frame]
    change_byte(hit.file, hit.start + at % (hit.end - hit.start), flip)
    with capture_logs() as logs:
        found = drain(reopened(spool, folder))
    whole = [number for number in range(14) if number != frame]
    assert found == [10 * number + second for number in whole for second in (0, 1)]
    assert dropped("damaged") - before >= 1
    assert value_of(SPOOL_TORN) == torn
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["spool_damaged"]


def spool_with_a_long_frame(folder: Path, *, to: int) -> tuple[Spool, list[Frame]]:
    """Return five frames, the first one's length reaching over those before the border `to`."""
    spool = spool_in(folder)
    frames = fill_frames(spool, folder, *([bundle_of(number)] for number in range(5)))
    first = frames[0]
    length = frames[to].start - first.start - HEAD_BYTES
    with files_in(folder)[0].open("r+b") as file:
        file.seek(first.start)
        file.write(struct.pack("<I", length))
    return spool, frames


def test_a_length_that_reaches_over_later_frames_loses_its_own_alone(tmp_path: Path) -> None:
    before, (spool, frames) = dropped("damaged"), spool_with_a_long_frame(tmp_path, to=4)
    change_byte(files_in(tmp_path)[0], frames[2].start + 30, 255)
    assert drain(reopened(spool, tmp_path)) == [1, 3, 4]
    assert dropped("damaged") - before == 2


def test_what_is_broken_behind_whole_frames_in_a_long_one_is_counted(tmp_path: Path) -> None:
    before, (spool, frames) = dropped("damaged"), spool_with_a_long_frame(tmp_path, to=4)
    change_byte(files_in(tmp_path)[0], frames[3].start + 30, 255)
    assert drain(reopened(spool, tmp_path)) == [1, 2, 4]
    assert dropped("damaged") - before == 2


def test_a_long_frame_whose_scan_is_stopped_is_kept_for_the_next_process(tmp_path: Path) -> None:
    spool = reopened(spool_with_a_long_frame(tmp_path, to=2)[0], tmp_path)
    spool.stop_scan()
    assert spool.read(max_bundles=60) is None
    assert not spool.is_empty
    assert drain(reopened(spool, tmp_path)) == [1, 2, 3, 4]


def test_a_long_frame_full_of_made_up_heads_is_lost_alone(tmp_path: Path) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    fill(spool, 1)
    with files_in(tmp_path)[0].open("ab") as file:
        made_up = HEAD_OF_NO_FRAME * 125_000
        file.write(struct.pack("<IIIqq", len(made_up), 0, 1, 0, 0) + made_up)
    again = reopened(spool, tmp_path)
    fill(again, 2)
    assert drain(again) == [1, 2]
    assert dropped("damaged") - before == 1


@pytest.mark.parametrize("at", range(16))
def test_a_file_whose_own_head_is_broken_gives_its_frames(tmp_path: Path, at: int) -> None:
    spool = spool_in(tmp_path)
    fill(spool, *range(5))
    change_byte(files_in(tmp_path)[0], at, 255)
    assert drain(reopened(spool, tmp_path)) == list(range(5))


def test_what_is_reported_to_be_damaged_is_what_is_counted_as_lost(tmp_path: Path) -> None:
    before, spool = dropped("damaged"), spool_in(tmp_path)
    spool.append([bundle_of(number) for number in range(5)])
    fill(spool, 5)
    found = spool.read(max_bundles=5)
    assert found
    spool.set_in_flight(found[1])
    files_in(tmp_path)[0].unlink()
    with capture_logs() as logs:
        fill(spool, 6)
    assert dropped("damaged") - before == 1
    assert [log["count"] for log in logs if log["event"] == "spool_damaged"] == [1]


# Each has a checksum that fits: another version may have written it, or a user who may write here.
UNREADABLE = [
    msgspec.msgpack.encode([[["topic", [b"key", b"value", 7]]]]).replace(b"topic", b"\xff" * 5),
    b"\x91" * 10_000,
    b"\xdd\xff\xff\xff\xff",
    b"",
    msgspec.msgpack.encode({"other": 1}),
]


@pytest.mark.parametrize("body", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_frame_that_holds_no_bundles_is_lost_alone(tmp_path: Path, body: bytes) -> None:
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
    (tmp_path / "default_node-1" / "000000000007.spool").write_bytes(b"something else" * 10)
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


HEAD_OF_NO_FRAME = struct.pack("<IIIqqI", 3_000_000, 0, 5, 0, 0, 0xFD2FB528)


FOREIGN = {
    "larger than any": lambda file: os.truncate(file, 3 * 2**30),
    "made-up heads": lambda file: file.write_bytes(
        b"gpuledger spool\2" + bytes(72) + HEAD_OF_NO_FRAME * 125_000
    ),
    "made-up heads without a file's own": lambda file: file.write_bytes(HEAD_OF_NO_FRAME * 125_000),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_a_file_that_no_spool_writes_is_set_aside_as_it_is_and_reported(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    spool = spool_in(tmp_path)
    fill(spool, 1)
    foreign = tmp_path / f"default_{NODE}" / "000000000000.spool"
    foreign.touch()
    write(foreign)
    size_bytes, before = foreign.stat().st_size, value_of(SPOOL_FILES_SET_ASIDE)
    with capture_logs() as logs:
        again = reopened(spool, tmp_path)
    assert foreign.with_suffix(".foreign").stat().st_size == size_bytes
    assert value_of(SPOOL_FILES_SET_ASIDE) - before == 1
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

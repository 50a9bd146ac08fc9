"""Any change of a file is found once, at the next poll."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.runtime.file_watch import POLL_INTERVAL_SECONDS, FileWatch
from tests.fakes.seconds import Seconds


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "token"
    made.write_text("first")
    return made


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


def finds_change(watch: FileWatch, clock: Seconds) -> bool:
    """Return whether the next poll finds a change."""
    clock.advance(POLL_INTERVAL_SECONDS)
    return watch.has_changed()


def rewrite(file: Path) -> None:
    """Write another text of the same length and restore the old modification time."""
    before = file.stat()
    until_later(file, lambda: file.write_text("other"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def until_later(file: Path, change: Callable[[], object]) -> None:
    """Make a change; repeat it until the file system's clock has moved."""
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:
        change()


def exchange(file: Path) -> None:
    """Replace the file by one that differs only in content and inode."""
    before, new = file.stat(), file.with_suffix(".new")
    new.write_text("other")
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda file: file.write_text("longer than before"),
    "in place": rewrite,
    "exchanged": exchange,
    "gone": Path.unlink,
    "readable": lambda file: until_later(file, lambda: file.chmod(0o600)),
    "touched": lambda file: os.utime(file, ns=(1, 1)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_any_kind_is_found_once(file: Path, clock: Seconds, kind: str) -> None:
    watch = FileWatch([file], monotonic=clock)
    assert not finds_change(watch, clock)
    CHANGES[kind](file)
    assert finds_change(watch, clock)
    assert not finds_change(watch, clock)


def test_a_missing_file_is_found_once_it_exists(file: Path, clock: Seconds) -> None:
    missing = file.with_name("missing")
    watch = FileWatch([missing], monotonic=clock)
    assert not finds_change(watch, clock)
    missing.write_text("now")
    assert finds_change(watch, clock)


def test_a_link_is_followed_to_its_file_as_in_a_mounted_secret(
    tmp_path: Path, clock: Seconds
) -> None:
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "token").write_text("same!")
    data, token = tmp_path / "..data", tmp_path / "token"
    data.symlink_to("..1")
    token.symlink_to("..data/token")
    watch = FileWatch([token], monotonic=clock)
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(data)
    assert finds_change(watch, clock)


def test_files_are_polled_no_more_often_than_configured(file: Path, clock: Seconds) -> None:
    watch = FileWatch([file], poll_interval_seconds=5, monotonic=clock)
    file.write_text("longer than before")
    clock.advance(4.5)
    assert not watch.has_changed()
    clock.advance(0.5)
    assert watch.has_changed()
    file.write_text("and longer than that")
    clock.advance(4.5)
    assert not watch.has_changed()


def test_a_change_between_the_stamp_and_a_later_poll_is_not_lost(
    file: Path, clock: Seconds
) -> None:
    """A caller that reads a file after its stamp may read it once too often, never too rarely."""
    watch = FileWatch([], monotonic=clock)
    watch.follow([file])
    file.write_text("longer than before")
    watch.follow([file, file.with_name("another")])
    assert finds_change(watch, clock)


def test_a_file_that_is_no_longer_followed_is_not_polled(file: Path, clock: Seconds) -> None:
    watch = FileWatch([file, file], monotonic=clock)
    assert watch.files == (file,)
    watch.follow([])
    file.unlink()
    assert not finds_change(watch, clock)

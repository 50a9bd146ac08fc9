"""What stands in a file's place holds nobody up, and is told for what it is."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger.certificates import trusting
from gpuledger.errors import SettingsError, UserError
from gpuledger.runtime.http.web_config import read_web_config
from gpuledger.settings import Secret
from gpuledger.small_files import MAX_BYTES, MAX_PEM_BYTES, read_small_file
from tests.errors import has_words

GIB = 1 << 30


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 3 * GIB)


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (os.mkfifo, "it is no regular file"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "it is no regular file"),
    "a folder": (Path.mkdir, "Is a directory"),
    "gigabytes": (sparse, "it is larger than"),
    "nothing": (lambda _: None, "No such file or directory"),
    "a loop of links": (lambda file: file.symlink_to(file), "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize(
    "read",
    [
        lambda file: Secret.load(file, name="password", is_known=True),
        read_web_config,
        lambda file: trusting(setting="ca_file", file=file),
    ],
    ids=["a secret", "the web configuration", "authorities"],
)
def test_what_is_no_small_file_is_a_mistake_that_is_named(
    read: Callable[[Path], object], what: str, tmp_path: Path
) -> None:
    make, said = ODD[what]
    file = tmp_path / "file"
    make(file)
    with pytest.raises((SettingsError, UserError), match=f"cannot read .*{re.escape(said)}"):
        read(file)


@pytest.mark.parametrize("bytes_", [0, MAX_BYTES])
def test_a_file_up_to_the_bound_is_read(bytes_: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * bytes_)
    assert read_small_file(file) == b"x" * bytes_
    file.write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(OSError, check=has_words("64 KiB")):
        read_small_file(file)
    assert len(read_small_file(file, max_bytes=MAX_PEM_BYTES)) == MAX_BYTES + 1


class HungMount:
    """A storage whose server is away until it is let go on."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def open(self, *_: object) -> int:
        """Stand in the place of `os.open`."""
        self.asked += 1
        self.answers.wait()
        raise FileNotFoundError(2, "No such file or directory")


def test_a_storage_that_does_not_answer_is_given_up_and_asked_once(tmp_path: Path) -> None:
    mount = HungMount()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            read_small_file(tmp_path / "password", answer_seconds=0.05, opening=mount.open)
    assert mount.asked == 1
    mount.answers.set()
    (tmp_path / "password").write_text("back")
    while True:  # the thread that hung ends now
        try:
            assert read_small_file(tmp_path / "password") == b"back"
        except TimeoutError:
            continue
        break

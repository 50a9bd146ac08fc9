"""Files are read up to a size limit, and the error names the file that cannot be read."""

import os
import re
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
    ids=["a secret", "the web configuration", "CA certificates"],
)
def test_a_missing_or_oversized_file_is_named_in_the_error(
    read: Callable[[Path], object], what: str, tmp_path: Path
) -> None:
    make, message = ODD[what]
    file = tmp_path / "file"
    make(file)
    with pytest.raises((SettingsError, UserError), match=f"cannot read .*{re.escape(message)}"):
        read(file)


@pytest.mark.parametrize("bytes_", [0, MAX_BYTES])
def test_a_file_up_to_the_size_limit_is_read(bytes_: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * bytes_)
    assert read_small_file(file) == b"x" * bytes_
    file.write_bytes(b"x" * (MAX_BYTES + 1))
    with pytest.raises(OSError, check=has_words("64 KiB")):
        read_small_file(file)
    assert len(read_small_file(file, max_bytes=MAX_PEM_BYTES)) == MAX_BYTES + 1

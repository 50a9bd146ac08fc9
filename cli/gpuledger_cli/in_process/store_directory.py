"""Checks a pipeline's store directory before the pipeline starts, and marks it at the end."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.commits import mark_complete
from gpuledger.store.query import open_table
from gpuledger.store.usage_schema import USAGE
from gpuledger_reports.reading.usage_sums import UsageReader

_MINUTE_US: Final = 60_000_000


def make_directory(given: Path, *, name: str = "--store") -> Path:
    """Create the directory if it does not exist, and return its absolute path.

    `name` is the option or setting that contains the directory. Raises `UserError` if it is not
    writable or is a URL. The error does not repeat the URL, which may contain credentials.
    """
    if re.match(r"[A-Za-z][\w+.-]*:/", str(given)):  # a Path keeps one of the slashes of a URL
        raise UserError(f"{name}: URLs are not supported; give a local directory")
    if given.exists() and not given.is_dir():
        raise UserError(f"{name} {mask_address(str(given))}: not a directory; give a directory")
    try:
        given.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given):
            pass
    except OSError as error:
        shown = mask_address(str(given))
        raise UserError(
            f"{name} {shown}: {error.strerror or error}; give a writable directory"
        ) from error
    return given.absolute()


def mark_finished(
    uri: str, storage_options: Mapping[str, str] | None = None, *, now_us: int
) -> None:
    """Mark the usage of a store complete through its last minute, so that it can be billed.

    Call this after the pipeline has ended and has lost nothing. The watermarks of a running
    pipeline end a minute or more before its last sample. `last_mark_us` limits the mark.
    """
    table = open_table(uri, USAGE.name, storage_options)
    if table is not None:
        reader = UsageReader(uri, storage_options=storage_options, is_finished=True)
        mark_complete(table, last_mark_us(reader.usage_end_us, now_us=now_us))


def last_mark_us(usage_end_us: int, *, now_us: int) -> int:
    """Return the end of the usage, but at most the end of the present minute.

    A clock that was ahead may have written later rows, and a mark cannot be set back.
    """
    return min(usage_end_us, (now_us // _MINUTE_US + 1) * _MINUTE_US)

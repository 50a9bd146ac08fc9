"""What commands take alike: which store, options of its storage, a file to write.

A file gets its name once it is written whole: whoever reads it, or finds it after a run that
failed, has no half of one.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import duckdb
import msgspec
from cyclopts import Parameter

from gpuledger.errors import UserError
from gpuledger.settings import load_settings
from gpuledger.settings.sources import variable_of
from gpuledger.store.object_files import PROTOCOLS

_OPTIONS_VARIABLE: Final = variable_of(("store", "storage_options"))
_URI_VARIABLE: Final = variable_of(("store", "uri"))


def _check_uri(_: object, uri: str) -> None:
    """Raise UserError for a store that cannot be one, before anything is read."""
    remedy = "give a directory or an object-store URI, such as s3://ledger/gpuledger"
    scheme, is_uri, *_rest = uri.partition("://")
    if not uri:
        raise UserError(f"--store or {_URI_VARIABLE}: empty value; {remedy}")
    if is_uri and scheme not in (*PROTOCOLS, "file"):
        raise UserError(f"--store or {_URI_VARIABLE}: unknown scheme: {scheme}; {remedy}")


StoreUri = Annotated[
    str,
    Parameter(
        help="Directory or object-store URI of the store, such as s3://ledger/gpuledger.",
        env_var=_URI_VARIABLE,
        validator=_check_uri,
    ),
]
StorageOption = Annotated[
    tuple[str, ...],
    Parameter(
        help="KEY=VALUE for the object store, as in store.storage_options; may be repeated."
        f" [env var: {_OPTIONS_VARIABLE}]",
        negative=(),
        show_default=False,
    ),
]


class _StorageSettings(msgspec.Struct, frozen=True, kw_only=True):
    storage_options: dict[str, str] = {}


class _EnvironmentSettings(msgspec.Struct, frozen=True, kw_only=True):
    store: _StorageSettings = _StorageSettings()


def storage_options_of(given: Sequence[str]) -> dict[str, str]:
    """Return options of a storage by their names, over those of the environment.

    Raises UserError for one that is not KEY=VALUE.
    """
    pairs = [option.partition("=") for option in given]
    # Without its value, which may be a key of the storage.
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise UserError(f"--storage-option: expected KEY=VALUE, got {wrong[0]!r}")
    environ = {name: text for name, text in os.environ.items() if name == _OPTIONS_VARIABLE}
    settings = load_settings(
        _EnvironmentSettings, prog="gpuledger", description="", argv=(), environ=environ
    )
    return settings.store.storage_options | {key: value for key, _, value in pairs}


def require_writable(output: Path | None) -> None:
    """Raise UserError where a file could not be written: before the work, and not behind it."""
    if output is None:
        return
    try:
        if _is_special(output):
            return
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if output.exists():
            output.open("ab").close()
        _partial(output).open("xb").close()
        _partial(output).unlink()
    except OSError as error:
        raise _refusal(output, error) from error


@contextmanager
def written(output: Path) -> Iterator[Path]:
    """Yield the file to write in the place of `output`, which takes that name when it is whole.

    Raises UserError where it cannot be written; then what was there before is there still.
    """
    # A device or a pipe stays what it is.
    file = output if _is_special(output) else _partial(output)
    try:
        yield file
        if file != output:
            file.replace(output.resolve())
    except (OSError, duckdb.IOException) as error:
        # DuckDB may read the store while it writes: that is not about this file.
        if isinstance(error, duckdb.IOException) and str(file) not in str(error):
            raise
        raise _refusal(output, error) from error
    finally:
        if file != output:
            file.unlink(missing_ok=True)


def _is_special(output: Path) -> bool:
    return output.exists() and not output.is_file() and not output.is_dir()


def _partial(output: Path) -> Path:
    # Where a link leads to: renamed there, the link stays one.
    return output.resolve().with_name(f".gpuledger-{os.getpid()}.part")


def _refusal(output: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(f"--output: cannot write {output}: {reason or error}")

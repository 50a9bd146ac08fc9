"""Options that commands share: the store, options of its storage, and the output file.

An output file is renamed to its final name when it is complete. Readers therefore never see a
partial file, and a failed run leaves no file.
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
from gpuledger.store.object_files import require_store_uri

_OPTIONS_VARIABLE: Final = variable_of(("store", "storage_options"))
_URI_VARIABLE: Final = variable_of(("store", "uri"))


def _check_uri(_: object, uri: str) -> None:
    """Raise UserError for an invalid store URI, before anything is read."""
    try:
        require_store_uri(uri)
    except ValueError as error:
        raise UserError(f"--store or {_URI_VARIABLE}: {error}") from error


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
    """Return storage options by name; the given options override the environment's options.

    Raises UserError for an option that is not KEY=VALUE.
    """
    pairs = [option.partition("=") for option in given]
    # The error does not quote the option, which may contain an access key.
    if any(not (key and equals) for key, equals, _ in pairs):
        raise UserError("--storage-option: expected KEY=VALUE; write a name, `=` and the value")
    environ = {name: text for name, text in os.environ.items() if name == _OPTIONS_VARIABLE}
    settings = load_settings(
        _EnvironmentSettings, prog="gpuledger", description="", argv=(), environ=environ
    )
    return settings.store.storage_options | {key: value for key, _, value in pairs}


def require_writable(output: Path | None) -> None:
    """Raise UserError if a file cannot be written, before the work begins."""
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
    """Yield a temporary file to write, which replaces `output` when it is complete.

    Raises UserError if it cannot be written; an existing file is then unchanged.
    """
    # Devices and pipes are written directly.
    file = output if _is_special(output) else _partial(output)
    try:
        yield file
        if file != output:
            file.replace(output.resolve())
    except (OSError, duckdb.IOException) as error:
        # DuckDB may also fail to read the store while it writes the file; that is another error.
        if isinstance(error, duckdb.IOException) and str(file) not in str(error):
            raise
        raise _refusal(output, error) from error
    finally:
        if file != output:
            file.unlink(missing_ok=True)


def _is_special(output: Path) -> bool:
    return output.exists() and not output.is_file() and not output.is_dir()


def _partial(output: Path) -> Path:
    # If `output` is a link, the file is renamed to the link's target, so that the link stays.
    return output.resolve().with_name(f".gpuledger-{os.getpid()}.part")


def _refusal(output: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(f"--output: cannot write {output}: {reason or error}")

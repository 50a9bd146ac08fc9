"""Lets DuckDB read the files of a store on an object store.

DuckDB's own extension for object stores is downloaded from the internet on first use and lacks
`storage_options`. `obstore` uses the same library as deltalake: it accepts the same options and
finds credentials in the same places.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from gpuledger.settings.secret import Secret

PROTOCOLS: Final = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
_REMEDY: Final = "give a directory or an object-store URI, such as s3://ledger/gpuledger"
_OF_CLIENT: Final = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate"),
        *("proxy_excludes", "timeout", "connect_timeout", "user_agent", "http1_only"),
        *("http2_only", "pool_idle_timeout", "pool_max_idle_per_host"),
    }
)
"""Options of the HTTP connection, as opposed to the store; written without a prefix."""
_OF_THE_LIBRARY: Final = (
    *("web_identity_token_file", "container_authorization_token_file", "federated_token_file"),
)
"""Options that name a file which deltalake itself reads repeatedly."""
_PREFIXES: Final = ("aws_", "google_", "azure_")


def require_store_uri(uri: str) -> None:
    """Raise `ValueError` unless a text is a directory or the URI of a store."""
    scheme, is_uri, path = uri.partition("://")
    if not uri:
        raise ValueError(f"empty value; {_REMEDY}")
    if is_uri and scheme not in (*PROTOCOLS, "file"):
        raise ValueError(f"unknown scheme: {scheme}; {_REMEDY}")
    if is_uri and scheme == "file" and not path.startswith("/"):
        raise ValueError("not an absolute path; write file:///path")


def is_object_store(uri: str) -> bool:
    """Return whether a store is on an object store, and not on a local disk."""
    scheme, is_uri, _ = uri.partition("://")
    return bool(is_uri) and scheme in PROTOCOLS


class FileRegistry(Protocol):
    """The part of a DuckDB connection that is used here."""

    def register_filesystem(self, filesystem: Any) -> None:  # noqa: ANN401  # DuckDB's own
        """Use the file system for all files with its protocol."""


def open_object_files(
    connection: FileRegistry, store_uri: str, storage_options: Mapping[str, str] | None = None
) -> None:
    """Let a DuckDB connection read a store's files; does nothing if they are on a local disk."""
    if not is_object_store(store_uri):
        return
    # Importing obstore takes a tenth of a second, which is unnecessary for a local store.
    from obstore.fsspec import FsspecStore  # noqa: PLC0415  # see above

    # deltalake takes all options from the environment, too; obstore only those of the store.
    from_environment, _ = split_options(
        {name: value for name, value in os.environ.items() if name.lower().startswith(_PREFIXES)}
    )
    client, store = split_options(resolve_options(storage_options))
    known = {name: value for name, value in store.items() if _is_known(store_uri, name, value)}
    file_system: Any = FsspecStore
    connection.register_filesystem(
        # Not cached, because an earlier store with the same protocol may have other options.
        file_system(
            store_uri.partition("://")[0],
            config=known,
            client_options=from_environment | client,
            skip_instance_cache=True,
        )
    )


def resolve_options(options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the options, with each `NAME_file` replaced by `NAME` and the file's content.

    Raises `SettingsError`, which does not show the file's content, if the file has no value.
    """
    resolved: dict[str, str] = {}
    for name, value in (options or {}).items():
        # deltalake also accepts names in upper case, like those of environment variables.
        bare = name.lower()
        if bare.endswith("_file") and not bare.endswith(_OF_THE_LIBRARY):
            secret = Secret.load(Path(value), name=f"storage_options.{name}")
            resolved[name[: -len("_file")]] = secret.reveal()
        else:
            resolved[name] = value
    return resolved


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options for the HTTP connection, and the options for the object store."""
    client: dict[str, str] = {}
    store: dict[str, str] = {}
    for name, value in options.items():
        bare = name.lower()
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
        if bare in _OF_CLIENT:
            client[bare] = value
        else:
            store[name.lower()] = value
    return client, store


def _is_known(store_uri: str, name: str, value: str) -> bool:
    """Return whether obstore supports the option; only deltalake supports some, for its commits."""
    from obstore.exceptions import BaseError, UnknownConfigurationKeyError  # noqa: PLC0415  # as above
    from obstore.store import from_url  # noqa: PLC0415  # as above

    config: Any = {name: value}
    try:
        from_url(store_uri, config=config)
    except UnknownConfigurationKeyError:
        return False
    except BaseError:  # for example a key without its secret; options are tried one by one here
        return True
    return True

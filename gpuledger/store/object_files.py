"""How DuckDB reads the files of a store that lies on an object store.

Its own extension for that is fetched from the internet when it is first used, and knows nothing of
`storage_options`. `obstore` is of the same make as what deltalake reads tables with: it takes the
same options, and finds credentials in the same places.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from gpuledger.settings.secret import Secret

PROTOCOLS: Final = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss"})
_OF_CLIENT: Final = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate"),
        *("proxy_excludes", "timeout", "connect_timeout", "user_agent", "http1_only"),
        *("http2_only", "pool_idle_timeout", "pool_max_idle_per_host"),
    }
)
"""Options of the connection and not of the store, without the prefix that they may have."""
_OF_THE_LIBRARY: Final = (
    *("web_identity_token_file", "container_authorization_token_file", "federated_token_file"),
)
"""Options that deltalake itself reads a file for, again and again."""
_PREFIXES: Final = ("aws_", "google_", "azure_")


class FileRegistry(Protocol):
    """What is asked of a connection to DuckDB."""

    def register_filesystem(self, filesystem: Any) -> None:  # noqa: ANN401  # DuckDB's own
        """Read the files of a protocol with this file system."""


def open_object_files(
    connection: FileRegistry, store_uri: str, storage_options: Mapping[str, str] | None = None
) -> None:
    """Let a connection read the files of a store, where it lies on an object store."""
    protocol, found, _ = store_uri.partition("://")
    if not found or protocol not in PROTOCOLS:
        return
    # Takes a tenth of a second, which a store in a folder need not wait for.
    from obstore.fsspec import FsspecStore  # noqa: PLC0415  # as said

    # deltalake takes them all from the environment too, obstore those of the store alone.
    from_environment, _ = split_options(
        {name: value for name, value in os.environ.items() if name.lower().startswith(_PREFIXES)}
    )
    client, store = split_options(resolve_options(storage_options))
    known = {name: value for name, value in store.items() if _is_known(store_uri, name, value)}
    file_system: Any = FsspecStore
    connection.register_filesystem(
        # Of another one of the same name, as of a store asked before, the options may differ.
        file_system(
            protocol,
            config=known,
            client_options=from_environment | client,
            skip_instance_cache=True,
        )
    )


def resolve_options(options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the options with the values of those that name a file of it, `NAME_file`.

    Raises SettingsError, which says nothing of what is in the file, where there is no value in it.
    """
    resolved: dict[str, str] = {}
    for name, value in (options or {}).items():
        # As deltalake takes them: a variable's name of the environment is as good.
        bare = name.lower()
        if bare.endswith("_file") and not bare.endswith(_OF_THE_LIBRARY):
            secret = Secret.load(Path(value), name=f"storage_options.{name}")
            resolved[name[: -len("_file")]] = secret.reveal()
        else:
            resolved[name] = value
    return resolved


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the options of the connection, and those of the store."""
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
    """Return whether a reader knows the option: some are for deltalake's commits alone."""
    from obstore.exceptions import BaseError, UnknownConfigurationKeyError  # noqa: PLC0415  # as above
    from obstore.store import from_url  # noqa: PLC0415  # as above

    config: Any = {name: value}
    try:
        from_url(store_uri, config=config)
    except UnknownConfigurationKeyError:
        return False
    except BaseError:  # such as a key without its secret, which are asked for one by one here
        return True
    return True

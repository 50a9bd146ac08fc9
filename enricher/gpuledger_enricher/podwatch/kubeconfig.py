"""The kubeconfig, or the pod's service account, read into the library's configuration.

Files may be anything and plug-ins may hang: each is bounded. What cannot be used is refused here,
before it replaces what can, in a message that quotes nothing of it: values of a
kubeconfig, the output of a plug-in and what it writes to standard error may hold secrets.
"""

import asyncio
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import urlsplit

import yaml
from kubernetes_asyncio.client.configuration import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config
from kubernetes_asyncio.config.exec_provider import ExecProvider
from kubernetes_asyncio.config.incluster_config import (
    SERVICE_CERT_FILENAME,
    SERVICE_TOKEN_FILENAME,
)
from kubernetes_asyncio.config.kube_config import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    ConfigNode,
    FileOrData,
    KubeConfigLoader,
)
from typing_extensions import override

from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.settings.groups import require_http_url
from gpuledger.settings.sources import explain_yaml
from gpuledger.small_files import MAX_PEM_BYTES, read_small_file
from gpuledger_enricher.podwatch.api import KubernetesError
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings

LOGIN: Final = "BearerToken"
"""Under which name the library keeps what is sent as `Authorization`."""
LOAD_SECONDS: Final = 30.0
"""How long a credential plug-in, and all else that is read, may take."""
_MAX_FILE_BYTES: Final = 1024 * 1024
_MAX_OUTPUT_BYTES: Final = 1024 * 1024
_MIN_SECRET_CHARACTERS: Final = 4
_END_SECONDS: Final = 1.0
_LISTS: Final = ("clusters", "contexts", "users")
_PLAIN: Final = frozenset({"command", "apiVersion"})
"""Keys of a plug-in whose values are no secrets, and name it."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class _UnusableError(Exception):
    """Something in it cannot be used; the message names no value."""


@dataclass(frozen=True, kw_only=True)
class ConfigurationSource:
    """Where the configuration is read from: a pod's service account, or files."""

    files: Sequence[Path]
    """The kubeconfigs; of a service account, its token."""
    context: str
    in_cluster: bool

    @classmethod
    def of(cls, settings: KubernetesSettings) -> "ConfigurationSource":
        """Return what the settings name, else the service account, else kubectl's own files."""
        in_cluster = not settings.kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ
        if in_cluster:
            paths = SERVICE_TOKEN_FILENAME
        else:
            paths = (
                settings.kubeconfig or os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
            )
        # As for kubectl, several files stand in one variable.
        files = [Path(path).expanduser() for path in paths.split(os.pathsep) if path]
        return cls(files=files, context=settings.context, in_cluster=in_cluster)

    async def load(self) -> Configuration:
        """Return what they hold; raises `KubernetesError`."""
        return await load_configuration(
            files=self.files, context=self.context, in_cluster=self.in_cluster
        )


def files_named_by(configuration: Configuration) -> list[Path]:
    """Return the authorities, the certificate and its key that a configuration names."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return [Path(file) for file in files if file]


def has_login(configuration: Configuration) -> bool:
    """Return whether a request with it carries credentials."""
    return bool(configuration.api_key.get(LOGIN) or configuration.cert_file)


async def load_configuration(
    *,
    files: Sequence[Path],
    context: str,
    in_cluster: bool,
    timeout_seconds: float = LOAD_SECONDS,
) -> Configuration:
    """Return the configuration of the pod's service account, or of these kubeconfigs together.

    Raises `KubernetesError` where they cannot be used, or not be read in time.
    """
    configuration = Configuration()
    secrets: list[str] = []
    try:
        async with asyncio.timeout(timeout_seconds):
            if in_cluster:
                token = _read(Path(SERVICE_TOKEN_FILENAME))
                _read(Path(SERVICE_CERT_FILENAME), max_bytes=MAX_PEM_BYTES)
                # Without the library's own refreshing: it reads the token within a request, and
                # what it raises there is no error of ours.
                load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call]  # the library types only some of its functions
                configuration.api_key[LOGIN] = _bearer(
                    token, of=f"the token in {SERVICE_TOKEN_FILENAME}"
                )
            else:
                await _load_kubeconfig(configuration, files, context=context, secrets=secrets)
        _require_sendable(configuration)
    except TimeoutError as error:
        raise KubernetesError(
            f"the Kubernetes configuration is not read within {timeout_seconds:g} s:"
            " a credential plug-in or an identity provider does not answer"
        ) from error
    except _UnusableError as error:
        raise KubernetesError(f"the Kubernetes configuration cannot be used: {error}") from error
    except ConfigException as error:
        detail = BasicCredentials(tuple(secrets)).mask(str(error))
        raise KubernetesError(f"no Kubernetes configuration: {detail}") from error
    except Exception as error:
        # The loaders raise whatever a malformed file makes them raise.
        detail = BasicCredentials(tuple(secrets)).mask(f"{type(error).__name__} {error}".rstrip())
        raise KubernetesError(f"the Kubernetes configuration cannot be read: {detail}") from error
    return configuration


def _require_sendable(configuration: Configuration) -> None:
    """Raise `ValueError` or `_UnusableError` where no request can be sent with it.

    Later it would replace a configuration that works.
    """
    url = configuration.host or ""
    require_http_url(url)
    if urlsplit(url).username is not None:
        raise _UnusableError("its server has a user in its address: name it among the users")
    if _CONTROL.search(configuration.api_key.get(LOGIN, "")):
        raise _UnusableError("its login has a line end or another control character in it")


async def _load_kubeconfig(
    configuration: Configuration, files: Sequence[Path], *, context: str, secrets: list[str]
) -> None:
    config = _merged(files)
    # Before anything is loaded, as the loaders quote values in their errors.
    secrets += [text for item in config["users"] for text in _secrets_of(item.value.get("user"))]
    _require_context(config, context)
    node = ConfigNode("kubeconfig", config)
    await _Loader(
        config_dict=node, config_base_path=None, active_context=context or None
    ).load_and_set(configuration)


def _merged(files: Sequence[Path]) -> dict[str, Any]:
    """Return several kubeconfigs as one, each part of it with the file whose paths it has."""
    merged: dict[str, Any] = {name: [] for name in _LISTS}
    existing = [file for file in files if os.path.lexists(file)]
    if not existing:
        raise _UnusableError(f"there is no file {os.pathsep.join(map(str, files))}")
    for file in existing:
        document = _parse(file)
        for name in _LISTS:
            # As for kubectl: of two items of one name the first file's counts.
            known = {item.value["name"] for item in merged[name]}
            merged[name] += [
                ConfigNode(f"{file}/{name}", item, str(file))
                for item in document.get(name) or []
                if item["name"] not in known
            ]
        if current := document.get("current-context"):
            merged["current-context"] = current
    return merged


def _parse(file: Path) -> Mapping[str, Any]:
    """Return a kubeconfig whose lists have the form that the library takes for granted."""
    text = _read(file, max_bytes=_MAX_FILE_BYTES)
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _UnusableError(f"{file} is no YAML: {explain_yaml(error)}") from error
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"{file} is no YAML that can be read") from error
    if not isinstance(document, dict):
        raise _UnusableError(f"{file}: expected a kubeconfig, a mapping")
    for name in _LISTS:
        items = document.get(name) or []
        kind = name.removesuffix("s")
        if not isinstance(items, list) or not all(
            isinstance(item, dict)
            and isinstance(item.get("name"), str)
            and isinstance(item.get(kind) or {}, dict)
            for item in items
        ):
            raise _UnusableError(f"{file}: {name}: expected a list, each with a name and a {kind}")
    return document


def _require_context(config: Mapping[str, Any], context: str) -> None:
    """Raise `_UnusableError` where what leads to the server and the user leads nowhere."""

    def find(kind: str, name: object) -> dict[str, Any] | None:
        named = (item.value for item in config[f"{kind}s"] if item.value["name"] == name)
        return next((value.get(kind) or {} for value in named), None)

    found = find("context", context or config.get("current-context"))
    if not found:
        what = "kubernetes.context" if context else "current-context"
        raise _UnusableError(f"there is no context of the name that {what} has")
    cluster = find("cluster", found.get("cluster"))
    if not cluster or not isinstance(cluster.get("server"), str):
        raise _UnusableError("there is no cluster with a server of the name that its context has")
    user = found.get("user")
    # A user without anything is one: a server may need no credentials.
    if user and find("user", user) is None:
        raise _UnusableError("there is no user of the name that its context has")


def _secrets_of(value: object, key: object = None) -> Iterator[str]:
    """Yield the texts within a user's part of a kubeconfig, each of which may be a secret."""
    if isinstance(value, dict):
        for inner_key, inner in value.items():
            yield from _secrets_of(inner, inner_key)
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets_of(inner)
    elif key not in _PLAIN and len(str(value)) >= _MIN_SECRET_CHARACTERS:
        # Shorter ones are `true` and the like: masked, they would leave no error that can be read.
        yield str(value)


def _read(file: Path, *, max_bytes: int = _MAX_FILE_BYTES) -> str:
    try:
        return read_small_file(file, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise _UnusableError(f"{file} is no text in UTF-8") from error
    except OSError as error:
        raise _UnusableError(f"cannot read {file}: {error.strerror}") from error


def _bearer(token: object, *, of: str) -> str:
    """Return the header of a token, which may end with a line; raises `_UnusableError`."""
    if not isinstance(token, str):
        raise _UnusableError(f"{of} is no text")
    bare = token.strip()
    if not bare:
        raise _UnusableError(f"{of} is empty")
    if _CONTROL.search(bare):
        raise _UnusableError(f"{of} has a line end or another control character in it")
    return f"Bearer {bare}"


class _Loader(KubeConfigLoader):
    """The library's loader, with tokens as kubectl reads them, and plug-ins in bounds."""

    cert_file: str | None
    key_file: str | None

    @override
    def _load_user_token(self) -> bool:
        assert self._user  # noqa: S101  # the library has looked
        user: Mapping[str, Any] = self._user.value
        if named := user.get("tokenFile"):
            file = Path(self._get_base_path(self._user.path), str(named))
            self.token = _bearer(_read(file), of=f"the token in {file}")
        elif (token := user.get("token")) not in (None, ""):
            self.token = _bearer(token, of="a user's token")
        else:
            return False
        return True

    @override
    async def load_from_exec_plugin(self) -> bool:
        assert self._user  # noqa: S101  # the library has looked
        status = await _query_plugin(ExecProvider(self._user["exec"]))
        if "token" in status:
            self.token = _bearer(status["token"], of="the token of the credential plug-in")
        elif "clientCertificateData" in status and "clientKeyData" in status:
            # The library hands certificates to OpenSSL as files.
            self.cert_file, self.key_file = (
                FileOrData(status, None, data_key_name=key, base64_file_content=False).as_file()
                for key in ("clientCertificateData", "clientKeyData")
            )
        else:
            raise _UnusableError("the credential plug-in gives neither token nor certificate")
        return True

    @override
    async def load_gcp_token(self) -> str:
        async def credentials() -> SimpleNamespace:
            assert self._user  # noqa: S101  # the library has looked
            config = self._user["auth-provider"]["config"]
            arguments = [str(config["cmd-path"]), *shlex.split(str(config["cmd-args"]))]
            output = json.loads(await _run_plugin(arguments, os.environ))["credential"]
            return SimpleNamespace(token=output["access_token"], expiry=output["token_expiry"])

        # The library's own runs the program of Google's former provider without any bound.
        self._get_google_credentials = credentials
        return await super().load_gcp_token()


async def _query_plugin(provider: ExecProvider) -> Mapping[str, Any]:
    """Return the status that a credential plug-in writes."""
    request = {
        "apiVersion": provider.api_version,
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }
    environ = {**provider.env, "KUBERNETES_EXEC_INFO": json.dumps(request)}
    output = await _run_plugin(provider.args, environ)
    try:
        credential = json.loads(output)
    except ValueError as error:
        raise _UnusableError("the output of the credential plug-in is no JSON") from error
    if not isinstance(credential, dict) or credential.get("apiVersion") != provider.api_version:
        raise _UnusableError("the credential plug-in answers in another apiVersion than asked for")
    status = credential.get("status")
    if not isinstance(status, dict):
        raise _UnusableError("the output of the credential plug-in has no status")
    return status


async def _run_plugin(arguments: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return what a plug-in writes to standard output; where cancelled, it and its children end."""
    process = await asyncio.create_subprocess_exec(
        *arguments,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # it may write secrets there, and to whose log
        # In a process group of its own, so that its children can be killed with it.
        start_new_session=True,
    )
    output = bytearray()
    code = None
    try:
        while process.stdout and len(output) <= _MAX_OUTPUT_BYTES:
            piece = await process.stdout.read(65_536)
            if not piece:
                code = await process.wait()
                break
            output += piece
    finally:
        if code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            # Read to its end, or the pipe stays open; a child that left the group may keep it so.
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await process.communicate()
    if len(output) > _MAX_OUTPUT_BYTES:
        raise _UnusableError(
            f"the credential plug-in writes more than {_MAX_OUTPUT_BYTES // 1024} KiB"
        )
    if code:
        raise _UnusableError(
            f"the credential plug-in {arguments[0]} ended with exit code {code};"
            " what it says is not shown, as it may hold secrets: run it by hand"
        )
    return bytes(output)

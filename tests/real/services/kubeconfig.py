"""Kubeconfig files: written for servers that the tests start, read for existing ones."""

from __future__ import annotations

import base64
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.real.services.certificates import KeyPair


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """An API server's address and certificate authority."""

    url: str
    ca_file: Path


@dataclass(frozen=True, kw_only=True)
class Login:
    """The credentials of a user: a client certificate or a token."""

    pair: KeyPair | None = None
    token: str | None = None


def write_kubeconfig(path: Path, *, cluster: Cluster, login: Login) -> Path:
    """Write a kubeconfig with one context and return its path."""
    user: dict[str, str] = {}
    if login.pair:
        user["client-certificate"] = str(login.pair.certificate)
        user["client-key"] = str(login.pair.key)
    if login.token:
        user["token"] = login.token
    there = {"server": cluster.url, "certificate-authority": str(cluster.ca_file)}
    context = {"cluster": "tests", "user": "tests"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": there}],
        "users": [{"name": "tests", "user": user}],
        "contexts": [{"name": "tests", "context": context}],
        "current-context": "tests",
    }
    path.write_text(yaml.safe_dump(document))
    path.chmod(0o600)
    return path


def read_kubeconfig(path: Path, *, folder: Path) -> tuple[Cluster, Login]:
    """Read the current context; inline content becomes files in `folder`. Raises KeyError."""
    document = yaml.safe_load(path.read_text())
    context = _named(document["contexts"], document["current-context"])["context"]
    cluster = _named(document["clusters"], context["cluster"])["cluster"]
    user = _named(document["users"], context["user"])["user"]
    ca_file = _file(cluster, "certificate-authority", folder)
    pair = None
    if user.keys() & {"client-certificate", "client-certificate-data"}:
        pair = KeyPair(
            certificate=_file(user, "client-certificate", folder),
            key=_file(user, "client-key", folder),
        )
    return Cluster(url=cluster["server"], ca_file=ca_file), Login(
        pair=pair, token=user.get("token")
    )


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(name)


def _file(holder: dict[str, str], key: str, folder: Path) -> Path:
    if key in holder:
        return Path(holder[key])
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{key}-", delete=False) as file:
        file.write(base64.b64decode(holder[f"{key}-data"]))
    return Path(file.name)

"""Kustomize, Helm and kubectl, the programs that apply the objects under k8s/ to a cluster."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LIMIT_SECONDS = 120.0


class KustomizeError(Exception):
    """A program ended with an error; the message contains its output."""


@dataclass(frozen=True, kw_only=True)
class Kustomize:
    """The `kustomize` command."""

    binary: Path

    def build(self, folder: Path) -> list[dict[str, Any]]:
        """Return the objects that a kustomization renders; raises KustomizeError."""
        printed = _run([self.binary, "build", folder])
        return _objects(printed)


@dataclass(frozen=True, kw_only=True)
class Helm:
    """The `helm` command, without access to a cluster."""

    binary: Path

    def template(
        self,
        chart: Path,
        *arguments: str | Path,
        name: str = "gpuledger",
        namespace: str = "default",
    ) -> list[dict[str, Any]]:
        """Return the objects that a chart renders; raises KustomizeError."""
        where: list[str | Path] = [name, chart, f"--namespace={namespace}"]
        return _objects(_run([self.binary, "template", *where, *arguments], errors=False))

    def __call__(self, *arguments: str | Path) -> str:
        """Run a command and return its output, including warnings; raises KustomizeError."""
        return _run([self.binary, *arguments])


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """The `kubectl` command, with a kubeconfig if there is one."""

    binary: Path
    kubeconfig: Path | None = None

    def kustomize(self, folder: Path) -> list[dict[str, Any]]:
        """Return the objects that a kustomization renders; raises KustomizeError."""
        return _objects(self("kustomize", folder))

    def __call__(self, *arguments: str | Path, folder: Path | None = None) -> str:
        """Run a command and return its output, including warnings; raises KustomizeError."""
        login = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        return _run([self.binary, *login, *arguments], folder=folder)


def _objects(printed: str) -> list[dict[str, Any]]:
    # PyYAML's own parser takes longer for an installation than Kustomize does.
    return [loaded for loaded in yaml.load_all(printed, Loader=yaml.CSafeLoader) if loaded]


def _run(argv: list[str | Path], *, folder: Path | None = None, errors: bool = True) -> str:
    """Return what a program prints, with or without its standard error."""
    done = subprocess.run(
        [str(part) for part in argv],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if errors else subprocess.PIPE,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise KustomizeError(f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr or ''}")
    return done.stdout

"""Helm and kubectl, the programs that apply the objects under k8s/ to a cluster."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

LIMIT_SECONDS = 120.0


class ToolError(Exception):
    """A program ended with an error; the message contains its output."""


@dataclass(frozen=True, kw_only=True)
class Helm:
    """The `helm` command, with a kubeconfig if there is one."""

    binary: Path
    kubeconfig: Path | None = None

    def template(
        self,
        chart: Path,
        *arguments: str | Path,
        name: str = "gpuledger",
        namespace: str = "default",
    ) -> list[dict[str, Any]]:
        """Return the objects that a chart renders; raises ToolError."""
        return _objects(self.text(chart, *arguments, name=name, namespace=namespace))

    def text(self, chart: Path, *arguments: str | Path, name: str, namespace: str) -> str:
        """Return the same as text; raises ToolError."""
        where: list[str | Path] = [name, chart, f"--namespace={namespace}"]
        return _run([self.binary, "template", *where, *arguments], errors=False)

    def __call__(self, *arguments: str | Path, folder: Path | None = None) -> str:
        """Run a command and return its output, including warnings; raises ToolError."""
        login = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        return _run([self.binary, *arguments, *login], folder=folder)


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """The `kubectl` command, with a kubeconfig if there is one."""

    binary: Path
    kubeconfig: Path | None = None

    def __call__(self, *arguments: str | Path, folder: Path | None = None) -> str:
        """Run a command and return its output, including warnings; raises ToolError."""
        login = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        return _run([self.binary, *login, *arguments], folder=folder)


def _objects(printed: str) -> list[dict[str, Any]]:
    # PyYAML's own parser takes longer for an installation than Helm does.
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
        raise ToolError(f"{' '.join(map(str, argv))}: {done.stdout}{done.stderr or ''}")
    return done.stdout

"""Parts and build programs that come as Debian packages."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.tools import commands, report
from tests.tools.errors import MissingToolError

INIT_SYSTEM = Path("/run/systemd/system")


def may_install() -> bool:
    """Return whether packages may be installed unasked: as root, where no service would start."""
    throw_away = os.environ.get("CI") == "true" or not INIT_SYSTEM.exists()
    return os.geteuid() == 0 and commands.which("apt-get") is not None and throw_away


def advice(package: str) -> str:
    """Name what a person has to install."""
    if commands.which("apt-get"):
        return f"install it with `apt-get install {package}`"
    return f"install it (Debian's package is `{package}`) and put it on PATH"


def install(package: str, *, name: str) -> None:
    """Install a package, with a second try on newer lists; raises MissingToolError."""
    argv = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        commands.run(argv, name=name, environment=quiet)
    except MissingToolError:
        commands.run(["apt-get", "update", "-q"], name=name, environment=quiet)
        commands.run(argv, name=name, environment=quiet)


def candidate(package: str) -> str:
    """Return the version that apt-get would install, or an empty string."""
    if commands.which("apt-cache") is None:
        return ""
    answer = commands.run(["apt-cache", "policy", package], name=package)
    found = re.search(r"Candidate: (?:\d+:)?(\d\S*)", answer)
    return found.group(1) if found else ""


def ensure_program(
    program: str, *, package: str, name: str, version: str, called: str | None = None
) -> Path:
    """Find a program on PATH, installing its package where that may be done unasked."""
    if commands.which(program) is None and may_install():
        with report.step(name, version, f"apt-get install {package}"):
            install(package, name=name)
    found = commands.which(program)
    if found is None:
        raise MissingToolError(name, f"{called or program} is missing: {advice(package)}")
    return found


@dataclass(frozen=True, kw_only=True)
class DebianTool:
    """A part that is one program of a Debian package; any version that is on PATH will do."""

    name: str
    program: str
    package: str
    given_by: str | None = None
    version: str = "(Debian)"

    def find(self) -> Path:
        """Return the program; raises MissingToolError."""
        found = commands.which(self.program)
        if found is None:
            raise MissingToolError(
                self.name, f"`{self.program}` is missing: {advice(self.package)}"
            )
        return found

    def provide(self) -> Path:
        """Return the program, installed first where that may be done unasked."""
        return ensure_program(
            self.program, package=self.package, name=self.name, version=self.version
        )

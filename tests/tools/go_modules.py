"""Parts built from their published Go modules, with the versions and checksums in this folder."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.tools import cache, commands, debian, report
from tests.tools.errors import MissingToolError

SOURCES = Path(__file__).parent
GO_PACKAGE = "golang-go"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def needed_go(module: Path) -> str:
    """Read the oldest Go version that a module's go.mod accepts."""
    found = re.search(r"^go (\S+)$", (module / "go.mod").read_text(), re.MULTILINE)
    return found.group(1) if found else "1.26"


def check_go(go: Path, *, module: Path, name: str) -> None:
    """Raise MissingToolError, with both versions, when this Go cannot build the module."""
    needed = needed_go(module)
    # Inside the module a Go that may fetch a newer toolchain answers with that one's version.
    answer = commands.run([go, "env", "GOVERSION"], name=name, folder=module).strip()
    if _numbers(answer) < _numbers(needed):
        raise MissingToolError(
            name, f"Go {needed} or newer is needed, this is {answer or go}: install a newer Go"
        )


@dataclass(frozen=True, kw_only=True)
class GoTool:
    """A program built once from `package` as the module in `module` pins it."""

    name: str
    version: str
    module: str
    package: str = "."
    tags: str = ""
    linker_flags: str = "-s -w"
    is_test: bool = False
    """Whether what is built are the package's tests, as a program."""
    files: str = ""
    """A folder of the package's module that is copied next to the program."""
    limit_seconds: float = 1800
    """Deadline of the build."""
    given_by: str | None = None

    @property
    def binary(self) -> Path:
        """Where the built program lies in the cache."""
        return cache.folder_of(self.name, self.version) / self.name

    def find(self) -> Path:
        """Return the built program; raises MissingToolError."""
        if self.binary.exists():
            return self.binary
        if commands.which("go") is None:
            raise MissingToolError(self.name, self._go_is_missing())
        raise MissingToolError(self.name, "not built yet: run `make test-tools`")

    def provide(self) -> Path:
        """Return the program, built first when the cache has none of this version."""
        with cache.locked(self.binary.parent):
            if not self.binary.exists():
                self._build()
        return self.binary

    def _go_is_missing(self) -> str:
        needed = needed_go(SOURCES / self.module)
        return f"Go is missing: install Go {needed} or newer, and put `go` on PATH"

    def _build(self) -> None:
        module = SOURCES / self.module
        go = self._ensure_go()
        check_go(go, module=module, name=self.name)
        with (
            report.step(self.name, self.version, "fetch its Go modules and build (minutes, once)"),
            cache.filling(self.binary.parent) as draft,
        ):
            verb = ["test", "-c"] if self.is_test else ["build"]
            argv: list[str | Path] = [go, *verb, "-mod=readonly", "-trimpath"]
            argv += ["-buildvcs=false"]
            argv += ["-tags", self.tags, "-ldflags", self.linker_flags]
            argv += ["-o", draft / self.name, self.package]
            # Without cgo no C compiler is asked for.
            commands.run(
                argv,
                name=self.name,
                folder=module,
                environment={"CGO_ENABLED": "0"},
                limit_seconds=self.limit_seconds,
            )
            if self.files:
                argv = [go, "list", "-mod=readonly", "-f", "{{.Module.Dir}}", self.package]
                there = commands.run(argv, name=self.name, folder=module).strip()
                shutil.copytree(Path(there) / self.files, draft / Path(self.files).name)

    def _ensure_go(self) -> Path:
        needed = _numbers(needed_go(SOURCES / self.module))
        if debian.may_install() and _numbers(debian.candidate(GO_PACKAGE)) >= needed:
            return debian.ensure_program(
                "go", package=GO_PACKAGE, name=self.name, version=self.version
            )
        go = commands.which("go")
        if go is None:
            raise MissingToolError(self.name, self._go_is_missing())
        return go

"""Compile the hot modules of the wheel with Cython.

pyproject.toml lists the modules. The wheel contains their Python sources next to the extension
modules; `.pxd` files next to the sources contain types for the compiler. An editable install does
not compile. Without a C compiler, the wheel is pure Python: it gives the same results more slowly.
"""

import fcntl
import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, Final

from Cython.Build import cythonize
from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

DIRECTIVES: Final[Mapping[str, object]] = {
    "language_level": 3,
    # Annotations are for readers and mypy, which accept an `int` for a `float`.
    "annotation_typing": False,
}
FLAGS: Final = (
    "-O3",
    "-g0",
    # A fused multiply-add (gcc's default on arm64) rounds once and Python rounds twice. The results
    # must be the same on every architecture, compiled or not.
    "-ffp-contract=off",
    "-w",  # warnings about generated C are of no use
)
_JOBS: Final = os.cpu_count() or 1


class NoCompilerError(Exception):
    """The C compiler or its headers are missing or do not work."""


class CompiledModules(BuildHookInterface[BuilderConfig]):
    """Adds an extension module to the wheel next to each source that pyproject.toml lists."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # type: ignore[explicit-override]  # typing_extensions is not part of the build environment
        """Compile for a standard wheel; without a compiler, print one line and build a pure one."""
        if self.target_name != "wheel" or version != "standard":
            return
        modules = [Path(name) for name in self.config.get("modules", [])]
        try:
            with _build_directory(Path(self.root)) as directory:
                made = _compile_modules(modules, directory)
        except NoCompilerError as error:
            self.app.display_warning(
                f"building a pure-Python wheel, which is slower: {error}; "
                "for a compiled one install gcc and Python's headers (Debian: gcc, python3-dev)"
            )
            return
        build_data["force_include"].update(made)
        build_data.update(pure_python=False, infer_tag=True)


@contextmanager
def _build_directory(root: Path) -> Iterator[Path]:
    """Yield the directory of compiled files, with `root` as working directory, to one at a time."""
    with chdir(root):
        name = f"{sysconfig.get_config_var('SOABI')}-{Path(_compiler()).name}"
        directory = Path("build", "cython", name)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory


def _compile_modules(modules: Sequence[Path], directory: Path) -> dict[str, str]:
    """Compile the modules that changed; return the path in the wheel of each extension module.

    All paths are relative to the working directory. Raises NoCompilerError.
    """
    _require_compiler()
    command = build_ext(Distribution({"ext_modules": _to_c(modules, directory)}))
    command.build_lib, command.build_temp = str(directory / "lib"), str(directory / "objects")
    command.parallel = _JOBS
    command.ensure_finalized()
    try:
        command.run()
    except (BaseError, CompileError, LinkError) as error:
        raise NoCompilerError(f"{_compiler()} failed (its output is above)") from error
    return {made: str(Path(made).relative_to(directory / "lib")) for made in command.get_outputs()}


def _to_c(modules: Sequence[Path], directory: Path) -> list[Extension]:
    extensions = [
        Extension(_import_name(module), [str(module)], extra_compile_args=[*FLAGS])
        for module in modules
    ]
    made: list[Extension] = cythonize(
        extensions,
        build_dir=str(directory / "c"),
        compiler_directives=dict(DIRECTIVES),
        nthreads=_JOBS,
        quiet=True,
    )
    return made


def _import_name(module: Path) -> str:
    """Return `gpuledger_sinks.loop` for `sinks/gpuledger_sinks/loop.py`."""
    parts = module.with_suffix("").parts
    return ".".join(parts if (Path(parts[0]) / "__init__.py").exists() else parts[1:])


def _require_compiler() -> None:
    headers = Path(sysconfig.get_path("include"))
    if shutil.which(_compiler()) is None:
        raise NoCompilerError(f"missing C compiler: {_compiler()}")
    if not (headers / "Python.h").exists():
        raise NoCompilerError(f"missing header: {headers / 'Python.h'}")


def _compiler() -> str:
    """Return the program that setuptools calls."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]

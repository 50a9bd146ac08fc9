"""What hatchling does beside packing files: the wheel's hot modules are compiled, by Cython.

Their Python sources stay the truth and lie beside them in the wheel. Types for the compiler stand
in `.pxd` files beside the sources; nothing is written there. An editable install compiles nothing:
one runs what one edits.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import Cython
from Cython.Build import cythonize
from Cython.Compiler.Errors import CompileError as CythonError
from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

DIRECTIVES: Final[Mapping[str, object]] = {
    "language_level": 3,
    # Annotations are for people and mypy: an `int` may come where one says `float`.
    "annotation_typing": False,
}
FLAGS: Final = (
    "-O3",
    "-g0",
    # A fused multiply-add, gcc's default on arm64, rounds once where Python rounds twice; books
    # must be the same to the byte, wherever and by whatever they are made.
    "-ffp-contract=off",
    "-w",  # warnings of generated C help nobody
)
_JOBS: Final = os.cpu_count() or 1
REMEDY: Final = (
    "install gcc and Python's headers (Debian: gcc, libc6-dev and python3-dev), "
    "or set HATCH_BUILD_NO_HOOKS=true for a wheel that works the same and is slower"
)


class UncompiledError(Exception):
    """The modules cannot be compiled; the message names the remedy."""


def find_modules(root: Path, named: Iterable[str]) -> list[Path]:
    """Return the sources that are named; raise UncompiledError where the root has no such file."""
    modules = [Path(name) for name in named]
    for module in modules:
        if module.suffix != ".py" or not (root / module).is_file():
            raise UncompiledError(
                f"pyproject.toml lists {module} to be compiled, and there is no such Python file; "
                "name the file, or take it out of the list"
            )
    return modules


def require_compiler(compiler: str, headers: Path) -> None:
    """Raise UncompiledError where there is no such C compiler, or no Python.h."""
    if shutil.which(compiler) is None:
        raise UncompiledError(f"there is no C compiler here (looked for {compiler}): {REMEDY}")
    if not (headers / "Python.h").exists():
        raise UncompiledError(f"there is no {headers / 'Python.h'} here: {REMEDY}")


def recipe_of(compiler: str, types: Iterable[Path]) -> str:
    """Return a name for what the objects depend on that would leave no newer source behind."""
    parts = [Cython.__version__, compiler, *FLAGS, *map(str, DIRECTIVES.items())]
    return hashlib.sha256("\n".join([*parts, *map(str, types)]).encode()).hexdigest()[:12]


def compile_modules(modules: Sequence[Path], place: Path) -> dict[str, str]:
    """Compile sources, those that changed, under `place`; all paths are from here.

    Gives for each extension module where it is to lie in the wheel. Raises what Cython and
    setuptools raise.
    """
    command = build_ext(Distribution({"ext_modules": _to_c(modules, place)}))
    command.build_lib, command.build_temp = str(place / "lib"), str(place / "objects")
    command.parallel = _JOBS
    command.ensure_finalized()
    command.run()
    return {made: str(Path(made).relative_to(place / "lib")) for made in command.get_outputs()}


def _to_c(modules: Sequence[Path], place: Path) -> list[Extension]:
    extensions = [
        Extension(
            ".".join(module.with_suffix("").parts), [str(module)], extra_compile_args=[*FLAGS]
        )
        for module in modules
    ]
    made: list[Extension] = cythonize(
        extensions,
        build_dir=str(place / "c"),
        compiler_directives=dict(DIRECTIVES),
        nthreads=_JOBS,
        quiet=True,
    )
    return made


@contextmanager
def _working_alone(root: Path, packages: Iterable[str]) -> Iterator[Path]:
    """Work in the root, where Cython looks for types, and one build at a time."""
    with chdir(root):
        types = chain.from_iterable(sorted(Path(name).rglob("*.pxd")) for name in packages)
        recipe = recipe_of(_compiler(), types)
        place = Path("build", "cython", f"{sysconfig.get_config_var('SOABI')}-{recipe}")
        place.mkdir(parents=True, exist_ok=True)
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield place


class CompiledModules(BuildHookInterface[BuilderConfig]):
    """Puts extension modules into the wheel, each beside the source that it was made from."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # type: ignore[explicit-override]  # typing_extensions is no part of the build's environment
        """Compile for a standard wheel; end the build with one clear line where it cannot be."""
        if self.target_name != "wheel" or version != "standard":
            return
        try:
            made = self._compiled()
        except UncompiledError as error:
            self.app.abort(str(error))
            return
        build_data["force_include"].update(made)
        build_data.update(pure_python=False, infer_tag=True)

    def _compiled(self) -> dict[str, str]:
        root = Path(self.root)
        modules = find_modules(root, self.config.get("modules", []))
        require_compiler(_compiler(), Path(sysconfig.get_path("include")))
        packages = sorted({module.parts[0] for module in modules})
        try:
            with _working_alone(root, packages) as place:
                made = compile_modules(modules, place)
        except CythonError as error:
            raise UncompiledError(f"Cython cannot compile what it names above: {error}") from error
        except (BaseError, CompileError, LinkError) as error:
            said = f"{_compiler()} failed, and says above why, if it says anything"
            raise UncompiledError(f"{said}; where headers are missing, {REMEDY}") from error
        return made


def _compiler() -> str:
    """Return the program that setuptools will call."""
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]

"""The wheel as it is installed: `gpuledger` alone in site-packages, and all programs at work.

The environment is a clean one; the dependencies are those of the tests' own environment, whose
folder is on the path behind it.
"""

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.compiled import hot_modules
from tests.wheel.building import ROOT, build_wheel

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
PROGRAMS = [package for package in PACKAGES if package != "gpuledger"]


class Environment(NamedTuple):
    bin: Path
    names: set[str]
    """What the wheel put into site-packages."""

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the checkout."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.bin,
            env=inherited,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def python(self, *lines: str) -> str:
        """Return what a program of some lines prints."""
        done = self.run("python", "-c", "\n".join(lines))
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return a clean environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder / "wheel")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    python = folder / "venv" / "bin" / "python"
    uv = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--python", str(python)]
    run([*uv, "--no-deps", "--no-index", str(wheel)])
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    names = {path.name for path in packages.iterdir()}
    # A folder that a .pth file names is on the path; the .pth files in it, such as that of the
    # editable install, are not read.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n")
    return Environment(python.parent, names)


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_site_packages_has_gpuledger_alone(installed: Environment) -> None:
    assert installed.names == {
        "gpuledger",
        f"gpuledger-{PYPROJECT['project']['version']}.dist-info",
    }


@pytest.mark.parametrize("script", PYPROJECT["project"]["scripts"])
def test_every_console_script_answers(installed: Environment, script: str) -> None:
    done = installed.run(script, "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert script in done.stdout


def test_an_analyst_imports_the_store(installed: Environment) -> None:
    version = installed.python(
        "import gpuledger.store.query, gpuledger; print(gpuledger.__version__)"
    )

    assert version.strip() == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("package", PROGRAMS)
def test_the_name_of_a_program_s_package_is_free_for_others(
    installed: Environment, package: str
) -> None:
    found = installed.python(
        "import gpuledger.store.query",
        "from importlib.util import find_spec",
        f"print(find_spec({package!r}))",
    )

    assert found.strip() == "None"


def test_a_program_takes_its_own_package_though_another_distribution_has_one_of_that_name(
    installed: Environment, tmp_path: Path
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "__init__.py").write_text("raise RuntimeError('not ours')")

    found = installed.python(
        "import sys",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "from gpuledger.programs import find_programs",
        "find_programs()",
        "import agent",
        "print(agent.__file__)",
    )

    assert found.strip().endswith("gpuledger/_programs/agent/__init__.py")


def test_any_module_of_a_program_is_run_by_its_name(installed: Environment) -> None:
    done = installed.run("python", "-m", "gpuledger", "simulator", "--help")

    assert done.returncode == 0, done.stderr
    assert "kube-api" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "usage: python -m gpuledger NAME"), (("simulatro",), "No module named simulatro")],
)
def test_a_name_that_is_missing_or_wrong_is_one_line(
    installed: Environment, arguments: Sequence[str], said: str
) -> None:
    done = installed.run("python", "-m", "gpuledger", *arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_programs_run_what_was_compiled(installed: Environment) -> None:
    names = [".".join(module.with_suffix("").parts) for module in hot_modules()]
    files = installed.python(
        "from gpuledger.programs import find_programs",
        "find_programs()",
        f"import {', '.join(names)}",
        f"print(*[{', '.join(f'{name}.__file__' for name in names)}], sep='\\n')",
    ).split()

    assert len(files) == len(names)
    assert [file for file in files if not file.endswith(EXTENSION_SUFFIXES[0])] == []


def test_a_process_that_a_program_spawns_finds_its_packages_too(installed: Environment) -> None:
    """What is pickled names its class by its module."""
    unpickled = installed.python(
        "from multiprocessing import get_context",
        "from gpuledger.programs import find_programs",
        "find_programs()",
        "from gpuledger_simulator.clock import SetClock",
        "with get_context('spawn').Pool(1) as pool:",
        "    print(pool.apply(repr, (SetClock(1, 2),)))",
    )

    assert unpickled.strip() == "SetClock(at_ns=1, by_ns=2)"

"""The installed wheel: the packages in site-packages, and every program running.

The environment is a clean one. The dependencies are those of the tests' environment, whose
directory comes after it on the path.
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

from gpuledger.programs import COMPONENTS
from tests.compiled import hot_modules
from tests.wheel.building import ROOT, build_wheel

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["importlinter"]["root_packages"]


class Environment(NamedTuple):
    bin: Path
    names: set[str]
    """The files that the wheel put into site-packages."""

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, outside of the checkout."""
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
        """Return the output of a Python program given as lines."""
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
    # A directory that a .pth file names is on the path, but the .pth files in it, such as that of
    # the editable install, are not read.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(folders)) + "\n")
    return Environment(python.parent, names)


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_site_packages_has_only_our_names(installed: Environment) -> None:
    assert installed.names == {
        *PACKAGES,
        f"gpuledger-{PYPROJECT['project']['version']}.dist-info",
    }


@pytest.mark.parametrize("subcommand", ["", *COMPONENTS, "config explain agent"])
def test_the_console_script_runs_every_component(installed: Environment, subcommand: str) -> None:
    done = installed.run("gpuledger", *subcommand.split(), "--help")

    assert (done.returncode, done.stderr) == (0, "")
    assert f"gpuledger {subcommand}" in done.stdout


def test_an_analyst_can_import_the_store(installed: Environment) -> None:
    version = installed.python(
        "import gpuledger.store.query, gpuledger; print(gpuledger.__version__)"
    )

    assert version.strip() == PYPROJECT["project"]["version"]


def test_the_simulator_runs_as_a_module(installed: Environment) -> None:
    done = installed.run("python", "-m", "gpuledger_simulator", "--help")

    assert done.returncode == 0, done.stderr
    assert "kube-api" in done.stdout


def test_programs_run_the_compiled_modules(installed: Environment) -> None:
    names = hot_modules()
    files = installed.python(
        f"import {', '.join(names)}",
        f"print(*[{', '.join(f'{name}.__file__' for name in names)}], sep='\\n')",
    ).split()

    assert len(files) == len(names)
    assert [file for file in files if not file.endswith(EXTENSION_SUFFIXES[0])] == []

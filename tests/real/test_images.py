"""The Dockerfile's instructions, executed without a container engine.

Each image's environment is created in a folder by the commands in the Dockerfile, only from its
lock file; every program must find all its imports. The base image, the user and the layers are not
tested here. Debian's packages are not installed either: their files must exist here.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.compiled import hot_modules
from tests.unit.deployment.components import ROOT, Stage, entrypoint, stages, targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BIN = Path(sys.executable).parent
# uv and hatchling of bootstrap.lock are those of the project's own environment, and uv's cache
# avoids downloading everything.
DONE_BY_MAKE = ["python", "-m", "pip"]
# The files of a Debian package that the Dockerfile's next steps need.
BROUGHT = {"gcc": "gcc", "libc6-dev": "/usr/include/stdio.h"}
COMPILED = ROOT / "build" / "cython"
"""Modules that `make compiled` left; the build compiles only those changed since."""
RUN_SECONDS = 1800
"""A busy machine takes long to compile."""
OF_IMAGES_ONLY = {"UV_NO_CACHE", "UV_LINK_MODE", "PATH"}
LEFT_OUT = ("GPULEDGER_", "PYTHON", "VIRTUAL_ENV", "KUBECONFIG", "KAFKA_")
NEEDED = {
    "agent": [
        "gpuledger_agent.context",
        "gpuledger_agent.source_selection",
        "gpuledger_simulator.simulation",
    ],
    "gpuledger": [
        "gpuledger_enricher.podwatch.pod_watch",
        "gpuledger_enricher.join.join_command",
        "gpuledger_sinks.remote_write.remote_write_sink",
        "gpuledger_sinks.alerts.alerts_sink",
        "gpuledger_sinks.store.store_sink",
        "gpuledger_reports.command",
        "gpuledger_reports.api.answering",
        "gpuledger_cli.demo.demo_command",
        "gpuledger_cli.topics",
        "gpuledger_simulator.kube",
        "gpuledger_simulator.__main__",
    ],
}


class Image:
    """A stage's file system as a folder, as far as the Dockerfile's instructions fill it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # This machine's access to the package registry is its own matter; the rest is the image's.
        own = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        self._environment = {**own, "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._working = self.inside("/build")
        self._working.mkdir(parents=True)
        if COMPILED.is_dir():
            shutil.copytree(COMPILED, self._working / COMPILED.relative_to(ROOT))

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def perform(self, stage: Stage, built: Callable[[str], Image]) -> None:
        for keyword, value in stage.instructions:
            if keyword == "ENV":
                self._set(shlex.split(value))
            elif keyword == "COPY":
                self._copy(shlex.split(value), built)
            elif keyword == "RUN":
                self._do(json.loads(value))

    def _do(self, words: Sequence[str]) -> None:
        if words[0] == "apt-get":
            require_packages(words[1:])
        elif words[:3] != DONE_BY_MAKE:
            self.run(words)

    def run(self, words: Sequence[str]) -> str:
        moved = [str(self.inside(word)) if word.startswith("/") else word for word in words]
        done = subprocess.run(
            moved,
            cwd=self._working,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_SECONDS,
        )
        assert done.returncode == 0, f"{moved}: {done.stderr}"
        return done.stdout

    def _set(self, assignments: Sequence[str]) -> None:
        for name, value in (one.split("=", 1) for one in assignments):
            if name not in OF_IMAGES_ONLY:
                is_path = value.startswith("/")
                self._environment[name] = str(self.inside(value)) if is_path else value

    def _copy(self, words: Sequence[str], built: Callable[[str], Image]) -> None:
        *sources, target = [word for word in words if not word.startswith("--from=")]
        origin = built(words[0].removeprefix("--from=")) if len(sources) < len(words) - 1 else None
        for source in sources:
            found = origin.inside(source) if origin else ROOT / source
            place = self.inside(target) if target.startswith("/") else self._working / target
            if found.is_dir():
                shutil.copytree(found, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(found, place)


def require_packages(arguments: Sequence[str]) -> None:
    """Fail if the files of a package that `apt-get install` names do not exist here."""
    names = [word for word in arguments if not word.startswith("-")][1:]
    missing = [name for name in names if not is_there(BROUGHT[name])]
    assert missing == [], "install these (Debian's names)"


def is_there(brought: str) -> bool:
    return bool(shutil.which(brought)) or Path(brought).exists()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Image]:
    """Return a function that builds a stage and all stages below it once, except the base image."""
    images: dict[str, Image] = {}

    def build(name: str) -> Image:
        if name not in images:
            image = Image(tmp_path_factory.mktemp(name))
            below, stage = [], stages()[name]
            while stage.name != "base":
                below.append(stage)
                stage = stages()[stage.base]
            for each in reversed(below):
                image.perform(each, build)
            images[name] = image
        return images[name]

    return build


@pytest.mark.parametrize("stage", targets().values(), ids=targets())
def test_an_environment_contains_everything_that_its_image_starts(
    built: Callable[[str], Image], stage: Stage
) -> None:
    (origin,) = [value for value in stage.values("COPY") if value.startswith("--from=")]
    image = built(shlex.split(origin)[0].removeprefix("--from="))
    environment = "/opt/gpuledger/bin"
    imports = f"import {', '.join(NEEDED[stage.name])}"

    program, *subcommand = entrypoint(stage)
    assert image.run([f"{environment}/{program}", *subcommand, "--version"])
    image.run([f"{environment}/python", "-c", imports])


def test_the_joins_environment_runs_compiled_modules(built: Callable[[str], Image]) -> None:
    image = built("gpuledger-environment")
    names = hot_modules()
    paths = ", ".join(f"{name}.__file__" for name in names)
    script = f"import {', '.join(names)}; print({paths})"
    files = image.run(["/opt/gpuledger/bin/python", "-c", script]).split()

    assert len(files) == len(names)
    assert [file for file in files if not file.endswith(EXTENSION_SUFFIXES[0])] == []


def test_the_agents_environment_contains_neither_the_kubernetes_client_nor_arrow(
    built: Callable[[str], Image],
) -> None:
    (packages,) = built("agent-environment").inside("/opt/gpuledger/lib").glob("*/site-packages")
    names = {path.name.partition("-")[0].lower() for path in packages.iterdir()}

    assert "pynvml.py" in names
    assert not {"kubernetes_asyncio", "pyarrow", "arro3_core", "deltalake", "duckdb"} & names

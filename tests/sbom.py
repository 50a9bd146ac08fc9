"""`make sbom`: one SBOM per image, with what its lock installs on the Dockerfile's Python.

The locks cover every Python version that the project supports; an image has one of them.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.unit.deployment.components import ROOT, Stage, images, stages

_PYTHON: Final = re.compile(r"python:(\d+\.\d+)\.\d+(?=-)")
_ENVIRONMENT: Final = re.compile(r"--from=([\w-]+-environment) ")
_LOCK: Final = re.compile(r"requirements/(\w+)\.lock")


def locks() -> dict[str, Path]:
    """Return the lock from which each image is built, by the image's name."""
    return {name: _lock_of(stage) for name, stage in images().items()}


def requirements(lock: Path) -> Iterator[str]:
    """Yield each requirement of a lock that the images install, on one line."""
    environment = _environment()
    for line in lock.read_text().replace("\\\n", "").splitlines():
        if line.startswith("#"):
            continue
        marker = Requirement(line.partition(" --hash")[0]).marker
        if marker is None or marker.evaluate(environment):
            yield line


def _lock_of(stage: Stage) -> Path:
    (environment,) = [
        found[1] for value in stage.values("COPY") if (found := _ENVIRONMENT.match(value))
    ]
    (name,) = [
        found[1] for value in stages()[environment].values("COPY") if (found := _LOCK.match(value))
    ]
    return ROOT / "requirements" / f"{name}.lock"


def _environment() -> dict[str, str]:
    found = _PYTHON.match(stages()["base"].base)
    assert found, "the base image has no Python version"
    made = {name: str(value) for name, value in default_environment().items()}
    made["python_version"], made["python_full_version"] = found[1], found[0].partition(":")[2]
    made["sys_platform"], made["platform_system"], made["os_name"] = "linux", "Linux", "posix"
    return made


def main(folder: Path) -> None:
    """Write the files; the empty index address keeps registry names out of the components."""
    folder.mkdir(parents=True, exist_ok=True)
    for image, lock in locks().items():
        done = subprocess.run(  # the program is next to this interpreter
            [
                *(Path(sys.executable).with_name("cyclonedx-py"), "requirements", "-"),
                *("--pyproject", ROOT / "pyproject.toml", "--index-url", ""),
                *("--output-format", "JSON", "--output-reproducible"),
            ],
            input="\n".join(requirements(lock)),
            env={"PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        # pyproject.toml has one name for both images.
        found["metadata"]["component"]["name"] = image
        (folder / f"{image}.cdx.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

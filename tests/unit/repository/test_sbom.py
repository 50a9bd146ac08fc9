"""`make sbom`: what each image carries, as its lock says, and no registry's address."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
IMAGES = sorted(
    set(re.findall(r"COPY requirements/(\w+)\.lock", (ROOT / "Dockerfile").read_text()))
    - {"bootstrap"}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make them all; the environment is the one that the tests run in."""
    made = tmp_path_factory.mktemp("sbom")
    argv = ["make", "--old-file=.venv/.dev", "sbom", f"SBOM_FOLDER={made}"]
    subprocess.run(argv, cwd=ROOT, check=True)
    return made


def locked(extra: str) -> set[tuple[str, str]]:
    lock = (ROOT / "requirements" / f"{extra}.lock").read_text().replace("\\\n", "")
    found = [
        Requirement(line.partition(" --hash")[0]) for line in lock.splitlines() if line[0] != "#"
    ]
    return {(canonicalize_name(one.name), str(one.specifier)[2:]) for one in found}


def test_each_image_has_one(folder: Path) -> None:
    assert IMAGES
    assert sorted(file.name for file in folder.iterdir()) == [f"{one}.cdx.json" for one in IMAGES]


@pytest.mark.parametrize("image", IMAGES)
def test_it_names_all_that_is_locked_with_its_hashes_and_nothing_else(
    folder: Path, image: str
) -> None:
    read: dict[str, Any] = json.loads((folder / f"{image}.cdx.json").read_text())

    assert read["bomFormat"] == "CycloneDX"
    assert read["metadata"]["component"]["name"] == "gpuledger"
    found = {(canonicalize_name(one["name"]), one["version"]) for one in read["components"]}
    assert found == locked(image)
    assert all(one["externalReferences"][0]["hashes"] for one in read["components"])


@pytest.mark.parametrize("image", IMAGES)
def test_its_components_name_no_address(folder: Path, image: str) -> None:
    read = json.loads((folder / f"{image}.cdx.json").read_text())

    assert "://" not in json.dumps(read["components"])

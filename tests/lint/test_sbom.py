"""`make sbom`: each image's packages, each in one version, without a registry's address."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sbom import locks, requirements

ROOT = Path(__file__).parents[2]
IMAGES = sorted(locks())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate all of them; the environment is that of the tests."""
    made = tmp_path_factory.mktemp("sbom")
    argv = ["make", "--old-file=.venv/.dev", "sbom", f"SBOM_FOLDER={made}"]
    subprocess.run(argv, cwd=ROOT, check=True)
    return made


def locked(lock: Path) -> Counter[str]:
    """Return how often a lock names each package."""
    lines = lock.read_text().replace("\\\n", "").splitlines()
    names = [Requirement(line.partition(" --hash")[0]).name for line in lines if line[0] != "#"]
    return Counter(map(canonicalize_name, names))


def read(folder: Path, image: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / f"{image}.cdx.json").read_text())
    return loaded


def test_each_image_has_an_sbom_with_its_name(folder: Path) -> None:
    assert {file.name for file in folder.iterdir()} == {f"{one}.cdx.json" for one in IMAGES}


@pytest.mark.parametrize("image", IMAGES)
def test_it_lists_each_locked_package_once_with_its_hashes(folder: Path, image: str) -> None:
    found = read(folder, image)
    packages = Counter(canonicalize_name(one["name"]) for one in found["components"])

    assert found["bomFormat"] == "CycloneDX"
    assert found["metadata"]["component"]["name"] == image
    assert packages == Counter(set(locked(locks()[image])))
    assert all(one["externalReferences"][0]["hashes"] for one in found["components"])


def test_if_a_package_has_a_version_per_python_the_one_of_the_images_is_listed(
    tmp_path: Path,
) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)\.", dockerfile, re.MULTILINE)
    lock = tmp_path / "some.lock"
    lock.write_text(
        f"a==1 ; python_full_version < '{python}' --hash=sha256:00\n"
        f"a==2 ; python_version == '{python}' \\\n    --hash=sha256:00\n"
        f"a==3 ; python_full_version >= '{python}.99' \\\n    --hash=sha256:00\n"
        "b==1 ; sys_platform == 'win32' --hash=sha256:00\n"
    )

    assert [line.split()[0] for line in requirements(lock)] == ["a==2"]


def test_security_md_says_which_lock_belongs_to_which_images() -> None:
    page = " ".join((ROOT / "SECURITY.md").read_text().split())
    for image, lock in locks().items():
        assert re.search(rf"`{image}(\.cdx\.json)?`[^()]*\((from )?`{lock.name}`\)", page), image


@pytest.mark.parametrize("image", IMAGES)
def test_its_components_contain_no_address(folder: Path, image: str) -> None:
    assert "://" not in json.dumps(read(folder, image)["components"])

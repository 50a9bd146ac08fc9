"""`make release`: all files of one version, with checksums that hold."""

import tarfile
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from tests.release import CHECKSUMS, main
from tests.sbom import locks
from tests.wheel.building import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHART = ROOT / "k8s" / "chart"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "release"
    main(folder)
    return folder


@pytest.mark.extended
def test_a_release_has_the_wheel_the_chart_and_sboms_with_their_checksums(release: Path) -> None:
    (wheel,) = release.glob("*.whl")
    listed = [line.split("  ") for line in (release / CHECKSUMS).read_text().splitlines()]
    sums = {name: digest for digest, name in listed}
    assert wheel.name.startswith(f"gpuledger-{VERSION}-")
    others = {f"gpuledger-{VERSION}.tgz", *(f"{name}.cdx.json" for name in locks())}
    assert sums.keys() == {wheel.name, *others}
    assert {file.name for file in release.iterdir()} == {*sums, CHECKSUMS}
    for name, digest in sums.items():
        assert sha256((release / name).read_bytes()).hexdigest() == digest


@pytest.mark.extended
def test_the_chart_of_a_release_contains_its_rules_and_dashboards(release: Path) -> None:
    with tarfile.open(release / f"gpuledger-{VERSION}.tgz") as archive:
        files = {file.name: archive.extractfile(file) for file in archive if file.isfile()}
        chart = files["gpuledger/Chart.yaml"]
        assert chart is not None
        assert yaml.safe_load(chart)["appVersion"] == VERSION
    shipped = [file for name in ("rules", "dashboards") for file in (CHART / name).iterdir()]
    assert shipped
    assert {f"gpuledger/{file.parent.name}/{file.name}" for file in shipped} <= files.keys()

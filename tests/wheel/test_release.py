"""`make release`: all files of one version, with checksums that hold."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.release import CHECKSUMS, main
from tests.sbom import locks
from tests.wheel.building import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.extended
def test_a_release_has_the_wheel_the_chart_and_sboms_with_their_checksums(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    main(folder)
    (wheel,) = folder.glob("*.whl")
    assert wheel.name.startswith(f"gpuledger-{VERSION}-")
    others = {f"gpuledger-{VERSION}.tgz", CHECKSUMS, *(f"{name}.cdx.json" for name in locks())}
    assert {file.name for file in folder.iterdir()} == {wheel.name, *others}
    subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=folder, check=True)  # noqa: S607


@pytest.mark.extended
def test_the_chart_of_a_release_contains_its_rules_and_dashboards(tmp_path: Path) -> None:
    """They are links in the checkout."""
    main(tmp_path / "release")
    archive = tmp_path / "release" / f"gpuledger-{VERSION}.tgz"
    subprocess.run(["tar", "xzf", archive, "-C", tmp_path], check=True)  # noqa: S607
    chart = tmp_path / "gpuledger"
    assert yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"] == VERSION
    for name in ("rules", "dashboards"):
        files = [file for file in (chart / name).iterdir() if not file.is_symlink()]
        assert {file.name for file in files} == {
            file.name for file in (ROOT / "k8s" / "chart" / name).iterdir()
        }

"""The configuration files beside docker-compose.yml, checked by the programs that read them."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.alertmanager import Alertmanager

COMPOSE = ROOT / "deploy" / "compose"


def test_prometheus_accepts_its_configuration(promtool: Path) -> None:
    command = [str(promtool), "check", "config", str(COMPOSE / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_accepts_its_configuration(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    alertmanager = start_alertmanager(config=(COMPOSE / "alertmanager.yml").read_text())

    assert alertmanager.alerts() == []


def test_alertmanager_accepts_the_shipped_grouping_and_inhibition(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    config = (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()

    assert start_alertmanager(config=config).alerts() == []


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    rules = map(str, (ROOT / "deploy" / "prometheus").glob("*.rules.yaml"))
    command = [str(promtool), "check", "rules", "--lint=all", "--lint-fatal", *rules]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_documented_scrape_configuration(
    promtool: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block)
    rules = ROOT / "deploy" / "prometheus" / "gpuledger.rules.yaml"
    (tmp_path / "gpuledger.rules.yaml").write_text(rules.read_text())
    command = [str(promtool), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr

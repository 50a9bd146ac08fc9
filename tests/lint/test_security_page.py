"""The page of permissions names the existing topics and groups, and no others."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

import gpuledger.bus.gaps
import gpuledger.dead_letter_queue
import gpuledger.runtime.process_metrics
import gpuledger_enricher.join.join_metrics
import gpuledger_enricher.podwatch.pod_metrics
import gpuledger_sinks.metrics
from gpuledger.topics import replay_group
from gpuledger_enricher.join.join_settings import GROUP as JOIN
from gpuledger_sinks.registry import KINDS
from tests.default_topics import BY_NAME

ROOT = Path(__file__).parents[2]
PERMISSIONS = (ROOT / "docs" / "reference" / "permissions.md").read_text()
HARDENING = (ROOT / "docs" / "guides" / "security-hardening.md").read_text()
GROUPS = {
    "join": JOIN,
    **{f"sink {kind.name}": kind.group for kind in KINDS.values()},
}
REPLAY_GROUPS = {replay_group(kind.group) for kind in KINDS.values() if kind.takes_replays}
CENTRAL = (
    gpuledger_enricher.podwatch.pod_metrics,
    gpuledger_enricher.join.join_metrics,
    gpuledger_sinks.metrics,
    gpuledger.bus.gaps,
    gpuledger.dead_letter_queue,
    gpuledger.runtime.process_metrics,
)
"""The modules with the metrics of podwatch, the join and the sinks."""
NAMES: dict[MetricWrapperBase, set[str]] = {
    gpuledger_enricher.join.join_metrics.NODE_UNRESPONSIVE_SINCE: {"node"},
    gpuledger_enricher.podwatch.pod_metrics.PENDING_GPU_PODS: {"namespace"},
    gpuledger_enricher.podwatch.pod_metrics.PENDING_GPUS: {"namespace"},
}
"""The only central metrics with names. The alert on an unresponsive node needs the node's name, and
such a node's own page cannot give it. Pods that wait for a node are on no node's page."""
ACTIONS = {"receive": 1, "send": 2}
"""The column of the table that has an operation's topics."""


def rows() -> dict[str, list[str]]:
    """Return the cells of the table of Kafka permissions by component."""
    table = PERMISSIONS.partition("| who | reads | writes |")[2].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {cells[0]: cells for cells in found}


def named(cell: str) -> set[str]:
    """Return the names in a cell, without a command's options."""
    return {name for name in re.findall(r"`([^`]+)`", cell) if not name.startswith("--")}


def test_every_topic_is_read_and_written_by_the_components_that_the_contract_names() -> None:
    document = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())
    topics = {name: one["address"] for name, one in document["channels"].items()}
    for action, column in ACTIONS.items():
        reported = {
            topics[one["channel"]["$ref"].rpartition("/")[2]]
            for one in document["operations"].values()
            if one["action"] == action
        }
        assert set[str]().union(*(named(cells[column]) for cells in rows().values())) >= reported


def test_only_existing_topics_are_named() -> None:
    reported = set[str]().union(*(named(cell) for cells in rows().values() for cell in cells[1:3]))

    assert reported == set(BY_NAME)


def test_groups_and_transactional_ids_are_those_of_the_components() -> None:
    found = rows()

    assert {name: named(cells[3]) for name, cells in found.items() if named(cells[3])} == {
        name: {group, *({replay_group(group)} & REPLAY_GROUPS)} for name, group in GROUPS.items()
    }
    for name, cells in found.items():
        assert named(cells[4]) <= {f"{GROUPS.get(name)}-…"}


@pytest.mark.parametrize("module", CENTRAL, ids=lambda module: module.__name__)
def test_only_the_agents_metrics_page_names_nodes_pods_or_users_of_gpus(module: ModuleType) -> None:
    assert "No names of pods or users of GPUs. Only the join names nodes" in HARDENING
    assert "only podwatch names namespaces (of pods that wait for GPUs)" in HARDENING
    families = [value for value in vars(module).values() if isinstance(value, MetricWrapperBase)]
    labels = {
        label
        for family in families
        for label in {*family._labelnames} - NAMES.get(family, set())  # noqa: SLF001  # a family has labels only with series
    }

    assert families
    assert labels & {"node", "pod", "namespace", "container", "uid", "gpu", "user"} == set()

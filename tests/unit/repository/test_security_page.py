"""docs/security.md names the topics, groups and workloads that there are."""

import re
from pathlib import Path

import yaml

from enricher.join.settings import GROUP as JOIN
from gpuledger.topics import BY_NAME
from sinks.alerts.service import GROUP as ALERTS
from sinks.otlp.service import GROUP as OTLP
from sinks.otlp.settings import OtlpSettings
from sinks.remote_write.service import GROUP as REMOTE_WRITE
from sinks.rows.service import GROUP as ROWS
from sinks.store.service import GROUP as STORE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()
GROUPS = {
    "join": JOIN,
    "sink remote_write": REMOTE_WRITE,
    "sink alerts": ALERTS,
    "sink store": STORE,
    "sink rows": ROWS,
    "sink otlp": OTLP,
}
ACTIONS = {"receive": 1, "send": 2}
"""Which column of the table has the topics of an operation."""


def rows() -> dict[str, list[str]]:
    """Give the cells of the table of Kafka's rights by deployable."""
    table = PAGE.partition("| deployable | reads | writes |")[2].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {cells[0]: cells for cells in found}


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_topic_is_read_and_written_by_whom_the_contract_names() -> None:
    document = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())
    topics = {name: one["address"] for name, one in document["channels"].items()}
    for action, column in ACTIONS.items():
        told = {
            topics[one["channel"]["$ref"].rpartition("/")[2]]
            for one in document["operations"].values()
            if one["action"] == action
        }
        assert set[str]().union(*(named(cells[column]) for cells in rows().values())) >= told


def test_no_topic_is_named_that_there_is_not() -> None:
    told = set[str]().union(*(named(cell) for cells in rows().values() for cell in cells[1:3]))

    assert told - {"gpuledger.*"} == {*BY_NAME, OtlpSettings().topic}


def test_groups_and_transactional_ids_are_the_deployables_own() -> None:
    found = rows()

    assert {name: named(cells[3]) for name, cells in found.items() if cells[3]} == {
        name: {group} for name, group in GROUPS.items()
    }
    for name, cells in found.items():
        assert named(cells[4]) <= {f"{GROUPS.get(name)}-…"}

"""The catalogue of XIDs agrees with a second copy of NVIDIA's facts."""

import csv
from pathlib import Path

import pytest

from gpuledger.records import Severity
from gpuledger.xids import RECOVERY_ACTION_CHANGED, all_xids, find_xid, recovery_action
from tests.tables import for_each

FACTS = Path("tests/data/xids/catalogue.tsv")
CATEGORIES = {
    "app (victim) / warning to the pod owner": ("app", {"warning"}),
    "app / info/warning to the pod owner": ("app", {"info", "warning"}),
    "context / none alone; carries the burst": ("context", {"info"}),
    "detail of 48 / merge into 48": ("detail", {"warning"}),
    "hardware / critical": ("hardware", {"critical"}),
    "hardware? / warning (catalog gives no bucket)": ("hardware", {"warning"}),
    "info (C2C) / warning": ("info", {"warning"}),
    "info / none (record)": ("info", {"info"}),
    "info+maintenance / warning: drain at leisure": ("maintenance", {"warning"}),
    "mechanical / critical": ("mechanical", {"critical"}),
    "node / critical: cordon + reboot node": ("node", {"critical"}),
    "node? / critical (catalog gives no bucket)": ("node", {"critical"}),
    "nvlink / critical for multi-GPU jobs": ("nvlink", {"critical"}),
    "nvlink5 / by sub-code: Fatal -> critical": ("nvlink5", {"warning"}),
    "reset / critical: drain + reset GPU": ("reset", {"critical"}),
    "software / warning": ("software", {"warning"}),
    "support / warning": ("support", {"warning"}),
    "trend / warning": ("trend", {"warning"}),
    "vm / critical": ("vm", {"critical"}),
}
# NVIDIA's own device plugin ignores these as errors of the application.
APPLICATION_ERRORS = {13, 31, 43, 45, 68}


def facts() -> list[dict[str, str]]:
    with FACTS.open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_the_catalogue_has_exactly_the_known_codes() -> None:
    assert [xid.code for xid in all_xids()] == [int(fact["xid"]) for fact in facts()]
    assert len(facts()) == 61


@for_each("fact", facts())
def test_a_code_has_nvidias_description_and_our_severity(fact: dict[str, str]) -> None:
    xid = find_xid(int(fact["xid"]))

    assert xid.mnemonic == fact["mnemonic"]
    assert xid.meaning == fact["meaning"]
    assert (xid.immediate or "-") == fact["immediate"]
    assert (xid.investigatory or "-") == fact["investigatory"]
    category, severities = CATEGORIES[fact["class"]]
    assert xid.category == category
    assert xid.severity.value in severities


@pytest.mark.parametrize("code", sorted(APPLICATION_ERRORS))
def test_an_error_of_an_application_is_never_more_than_information(code: int) -> None:
    assert find_xid(code).severity is Severity.INFO


@pytest.mark.parametrize("code", [0, 1, 999, 100_000])
def test_a_code_that_is_not_in_the_catalogue_is_an_unknown_warning(code: int) -> None:
    xid = find_xid(code)

    assert (xid.category, xid.severity, xid.mnemonic) == ("unknown", Severity.WARNING, None)


@pytest.mark.parametrize(
    ("named", "action"),
    [
        (0, "NONE"), ("none", "NONE"),
        (1, "RESET_GPU"), ("reset", "RESET_GPU"),
        (2, "RESTART_BM"), ("reboot", "RESTART_BM"),
        (3, "DRAIN_P2P"), ("drain_p2p", "DRAIN_P2P"),
        (4, "DRAIN_AND_RESET"), ("drain_and_reset", "DRAIN_AND_RESET"),
        (42, "RECOVERY_ACTION_42"),
    ],
)  # fmt: skip
def test_a_recovery_action_has_one_name_whatever_reports_it(named: int | str, action: str) -> None:
    assert recovery_action(named) == action


def test_the_code_of_a_changed_recovery_action_is_in_the_catalogue() -> None:
    assert find_xid(RECOVERY_ACTION_CHANGED).mnemonic == "GPU_RECOVERY_ACTION_CHANGED"

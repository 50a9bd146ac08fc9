"""The complete error messages: field or option, value and remedy, in one line.

Tests of what is refused look at the error's type and at the names in its message
(`tests.errors.has_words`); how a message is worded is held here alone.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from gpuledger.errors import UserError
from gpuledger.runtime.http.web_config import read_web_config
from gpuledger.settings import load_settings
from gpuledger.settings.groups import parse_listen
from gpuledger.time_ranges import parse_duration, parse_moment
from gpuledger_agent.exposition.dcgm_fields import parse_counters, read_counters
from gpuledger_agent.settings import AgentSettings, ExpositionSettings, KubeletSettings, name_node
from gpuledger_agent.source_selection import find_source
from gpuledger_cli.dead_letters.dead_letter_log import parse_position
from gpuledger_cli.demo.plan import check_url, find_scenario, find_store, parse_bus
from gpuledger_enricher.podwatch.election import namespace_of
from gpuledger_enricher.podwatch.pod_settings import LeaseSettings, PodwatchSettings
from gpuledger_simulator.simulation import choose_epoch_ns


def load_agent(*argv: str, **environ: str) -> AgentSettings:
    return load_settings(AgentSettings, prog="p", description="", argv=argv, environ=environ)


def web_config_of_nothing(folder: Path) -> Any:  # noqa: ANN401  # only its error is used
    (folder / "web.yml").write_text("{}\n")
    return read_web_config(folder / "web.yml")


def epoch_without_a_number(folder: Path) -> int:
    (folder / "epoch").write_text("soon")
    return choose_epoch_ns(0, file=folder / "epoch")


def store_in_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return find_store(folder / "file")


def misnamed_counter(_: Path) -> object:
    lines = ["DCGM_FI_DEV_GPU_TEMP, gauge, a", "gpu_temp, gauge, a"]
    return list(parse_counters(lines, name="x", skip=lambda _line: None))


MESSAGES: Final[dict[str, tuple[Callable[[Path], object], str]]] = {
    "a bus": (
        lambda _: parse_bus("nats://a:1"),
        "--bus nats://a:1: expected `memory` or `kafka://host:port[,host:port…]`",
    ),
    "a scenario": (
        lambda folder: find_scenario(folder / "absent.yaml"),
        "--scenario {folder}/absent.yaml: no such file",
    ),
    "a receiver": (
        lambda _: check_url("--remote-write-url", "prometheus:9090"),
        "--remote-write-url 'prometheus:9090' must begin with http:// or https://",
    ),
    "a store by URL": (
        lambda _: find_store(Path("s3://bucket/x")),
        "--store: URLs are not supported; give a local directory",
    ),
    "a store in a file": (
        store_in_a_file,
        "--store {folder}/file: not a directory; give a directory",
    ),
    "a time": (
        lambda _: parse_moment("yesterday", option="--from", now_ms=0),
        (
            "--from: invalid time 'yesterday'; write 2026-11-21T14:00:00Z, 2026-11-21 (start of"
            " that day, UTC), -12h (ago) or now"
        ),
    ),
    "a duration": (
        lambda _: parse_duration("5y", option="--lead-in"),
        "--lead-in: invalid duration '5y'; write 90s, 15m, 1h30m, 7d or 2w",
    ),
    "a position of a dead letter": (
        lambda _: parse_position("17"),
        (
            "invalid position of a dead-letter record: '17'; give PARTITION:OFFSET, such as 0:17,"
            " from `gpuledger dead-letters list`"
        ),
    ),
    "a source": (
        lambda _: load_agent(GPULEDGER_SOURCE="dcgm"),
        "GPULEDGER_SOURCE: expected auto, nvml, simulated[:FILE] or recorded:FILE, got 'dcgm'",
    ),
    "a number": (
        lambda _: load_agent(GPULEDGER_SAMPLING_INTERVAL_SECONDS="soon"),
        "GPULEDGER_SAMPLING_INTERVAL_SECONDS: expected a number >= 0.25 and <= 60, got 'soon'",
    ),
    "an option": (
        lambda _: load_agent("--nonsense"),
        "unknown option: --nonsense; see `p --help`",
    ),
    "an option without its value": (
        lambda _: load_agent("--config"),
        "--config: expected one argument; see `p --help`",
    ),
    "a settings file": (
        lambda folder: load_agent("--config", str(folder / "none.yaml")),
        "cannot read settings file {folder}/none.yaml: No such file or directory",
    ),
    "a node's name": (
        lambda _: name_node(AgentSettings(), {"NODE_NAME": "node/1"}),
        (
            "NODE_NAME: invalid node name: 'node/1' (letters, digits, '-', '_' and '.', at most"
            " 253 characters); in Kubernetes, set NODE_NAME to the node's"
            " metadata.name; the shipped DaemonSet sets it from spec.nodeName"
        ),
    ),
    "a kubelet of a recording": (
        lambda _: find_source(
            AgentSettings(
                source="recorded:a.jsonl", kubelet=KubeletSettings(enabled=True), node_name="n"
            )
        ),
        (
            "kubelet.enabled: true, but source recorded:a.jsonl has no kubelet; set it"
            " to auto or false"
        ),
    ),
    "labels of pods of a recording": (
        lambda _: find_source(
            AgentSettings(
                source="recorded:a.jsonl",
                exposition=ExpositionSettings(pod_labels=("team",)),
                node_name="n",
            )
        ),
        "exposition.pod_labels: source recorded:a.jsonl has no kubelet; remove them",
    ),
    "labels of pods that are one": (
        lambda _: load_agent(GPULEDGER_EXPOSITION__POD_LABELS="a.b,a-b"),
        "GPULEDGER_EXPOSITION__POD_LABELS: duplicate label label_a_b from a-b and a.b; remove one",
    ),
    "a kubelet's host": (
        lambda _: load_agent(GPULEDGER_KUBELET__API__HOST="node:10250"),
        "GPULEDGER_KUBELET__API__HOST: expected an IP address or a host's name, got 'node:10250'",
    ),
    "a list of counters": (
        lambda folder: read_counters(folder / "absent"),
        "exposition.counters_file: cannot read {folder}/absent: No such file or directory",
    ),
    "a counter": (misnamed_counter, "x:2: not the name of a DCGM field: 'gpu_temp'"),
    "a listening address": (
        lambda _: parse_listen("9820"),
        "expected host:port such as 0.0.0.0:9820, got '9820'",
    ),
    "a web configuration": (
        web_config_of_nothing,
        (
            "http.web_config_file: {folder}/web.yml: tls_server_config and basic_auth_users are"
            " missing; set one of them"
        ),
    ),
    "annotations": (
        lambda _: PodwatchSettings(annotations=["*"]),
        "annotations: invalid value: *; list the names to publish",
    ),
    "a lease's namespace": (
        lambda folder: namespace_of(LeaseSettings(), own=folder / "namespace"),
        (
            "set lease.namespace: there is no service account to take it from"
            " ({folder}/namespace: No such file or directory)"
        ),
    ),
    "an epoch": (
        epoch_without_a_number,
        "{folder}/epoch: invalid epoch; delete the file to start a new run",
    ),
}


@pytest.mark.parametrize("mistake", MESSAGES)
def test_an_error_has_the_documented_message(mistake: str, tmp_path: Path) -> None:
    make, message = MESSAGES[mistake]
    in_full = re.escape(message.replace("{folder}", str(tmp_path)))
    with pytest.raises((UserError, ValueError), match=f"^{in_full}$"):
        make(tmp_path)

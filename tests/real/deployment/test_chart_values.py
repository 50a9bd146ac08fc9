"""The chart's values: described, checked by a schema, and none without an effect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.real.deployment.chart import CASES, CENTRAL, CHART, defaults, merged, render_chart
from tests.real.deployment.rendering import strings
from tests.real.services.cluster_tools import ToolError
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.real.deployment.rendering import Manifest
    from tests.real.services.cluster_tools import Helm

CHANGED: Final[dict[str, object]] = {
    "components": "central",
    "image.pullPolicy": "Never",
    "imagePullSecrets": [{"name": "other"}],
    "kafka.bootstrapServers": "other:9092",
    "kafka.env": {"GPULEDGER_LOG__LEVEL": "debug"},
    "receivers": {"other": {"settings": {"url": "http://other"}}},
    "prices": {"currency": "EUR"},
    "store.uri": "gs://other",
    "schedule": "0 0 * * *",
    "arguments": ["--other"],
    "prometheusUrl": "http://other",
    "kafka.securityProtocol": "SASL_PLAINTEXT",
    "kafka.saslMechanism": "PLAIN",
    "kafka.tokenUrl": "https://other",
    "agent.kubeletPath": "/other",
    "agent.spoolPath": "/other",
    "tolerations": [{"key": "other", "operator": "Exists"}],
    "extraEnv": [{"name": "OTHER", "value": "1"}],
    "settings": {"log": {"level": "warning"}},
    "cpu": "7",
    "memory": "7",
    "size": "7Gi",
    "sinks.settings.remote_write.url": "http://other",
    "sinks.settings.alerts.urls": ["http://other"],
    "from": [{"podSelector": {}}],
    "interval": "7s",
    "scrapeTimeout": "7s",
    "relabelings": [{"targetLabel": "other", "replacement": "1"}],
    "metricRelabelings": [{"action": "labeldrop", "regex": "other"}],
    "prometheusRule.groups": ["gpuledger-gpus"],
    "prometheusRule.disabled": ["GpuledgerSamplesDropped"],
    "prometheusRule.runbookUrl": "https://wiki.example.com",
}
"""Other values that the schema accepts, by path or by the last name; other types need none."""
MISTAKES: Final[list[tuple[dict[str, Any], str]]] = [
    ({"kafka": {"bootstrapServer": "broker:9092"}}, "'bootstrapServer' not allowed"),
    ({"kafka": {"bootstrapServers": "broker"}}, '"broker"; write HOST:PORT'),
    ({"components": "central"}, "kafka.bootstrapServers: missing for components=central"),
    ({"components": "podwatch"}, "kafka.bootstrapServers: missing for components=podwatch"),
    ({"components": "others"}, "/components"),
    (
        {"kafka": {"bootstrapServers": "broker:9092", "trial": {"enabled": True}}},
        "kafka.trial.enabled and kafka.bootstrapServers",
    ),
    ({"kafka": {"env": {"OTHER": "1"}}}, 'kafka.env: invalid value "OTHER"; use names of'),
    (
        {"kafka": {"env": {"GPULEDGER_KAFKA__SASL_MECHANISM": "PLAIN"}}},
        "SASL_MECHANISM: the chart sets this variable; set the value kafka.saslMechanism instead",
    ),
    (
        {"kafka": {"env": {"GPULEDGER_KAFKA__SASL_PASSWORD_FILE": "/password"}}},
        "SASL_PASSWORD_FILE: the chart sets this variable",
    ),
    (
        {"agent": {"extraEnv": [{"name": "NODE_NAME", "value": "other"}]}},
        "extraEnv of agent: NODE_NAME is already set; remove it",
    ),
    (
        {**CENTRAL, "join": {"extraEnv": [{"name": "GPULEDGER_KAFKA__SASL_USERNAME"}]}},
        "extraEnv of join: GPULEDGER_KAFKA__SASL_USERNAME is already set",
    ),
    (
        {"agent": {"extraEnv": [{"name": "TWICE", "value": "1"}, {"name": "TWICE", "value": "2"}]}},
        "extraEnv of agent: TWICE is already set",
    ),
    ({"kafka": {"tokenUrl": "http://login"}}, "kafka.tokenUrl: invalid value"),
    ({"image": {"registry": "https://registry.example.com"}}, "write HOST/PATH"),
    (
        {**CENTRAL, "components": "all", "image": {"tag": f"1.0@sha256:{'0' * 64}"}},
        "image.tag: a digest with components=all",
    ),
    ({"store": {"uri": "/mnt/store"}}, "write s3://BUCKET/PATH"),
    (
        {"receivers": {"Second": {"settings": {"url": "http://other"}}}},
        "use up to 10 lowercase letters",
    ),
    ({"receivers": {"second": {}}}, "receivers.second.settings.url: missing; write"),
    ({"receivers": {"second": {"settings": {"uri": "http://a"}}}}, "/receivers/second/settings"),
    ({**CENTRAL, "bill": {"enabled": True}}, "bill.enabled: set prices"),
    (
        {**CENTRAL, "reports": {"enabled": True}, "sinkStore": {"enabled": False}},
        "there is no store",
    ),
    (
        {"networkPolicy": {"from": [{"namespaceSelector": {"matchLabel": {"a": "b"}}}]}},
        "/networkPolicy/from/0/namespaceSelector",
    ),
    ({"networkPolicy": {"from": None}}, "networkPolicy.from: missing; list the peers"),
    ({**CENTRAL, "sinkScaler": {"enabled": True, "from": None}}, "sinkScaler.from: missing"),
    (
        {
            **CENTRAL,
            "fullnameOverride": "x" * 37,
            "receivers": {"tenletters": {"settings": {"url": "http://other"}}},
        },
        "use a shorter name or fullnameOverride",
    ),
    ({"agent": None}, "missing property 'agent'"),
    ({"agent": {"port": None}}, "at '/agent': missing property 'port'"),
    ({"topics": None, "sinkAlerts": None}, "missing properties"),
    ({"bill": {"arguments": None}}, "at '/bill': missing property 'arguments'"),
    ({"agent": {"extraEnv": [{"name": "A", "value": 5}]}}, "extraEnv/0/value': got number, want"),
    (
        {"agent": {"tolerations": [{"key": "a", "value": True}]}},
        "tolerations/0/value': got boolean",
    ),
    ({"autoscaling": {"lagSeconds": "0.0"}}, "/autoscaling/lagSeconds"),
    ({"cluster": "Not_A_Label"}, "cluster: invalid value"),
    ({"fullnameOverride": "-"}, "fullnameOverride: invalid value"),
    ({**CENTRAL, "autoscaling": {"prometheusUrl": "prometheus:9090"}}, "prometheusUrl: invalid"),
    ({"prometheusRule": {"runbookUrl": "wiki"}}, "prometheusRule.runbookUrl: invalid value"),
    ({"agent": {"settings": {"exposition": {"dcgm_name": "old"}}}}, "/agent/settings/exposition"),
    ({**CENTRAL, "join": {"settings": {"log": {"level": "all"}}}}, "/join/settings/log/level"),
    ({"prices": {"prices": [{"name": "all", "per_hour": 2}]}}, "/prices/prices/0"),
    ({"agent": {"resources": {"limits": {"memory": "2 GB"}}}}, "/agent/resources/limits/memory"),
    ({"agent": {"resources": {"limits": {"mem": "2G"}}}}, "'mem' not allowed"),
    ({"store": {"size": "20gb"}}, "/store/size"),
    ({"store": {"size": 100}}, 'store.size: invalid value "100"; write a size with a unit'),
    ({"kafka": {"trial": {"size": "100"}}}, "kafka.trial.size: invalid value"),
    ({"prices": {"prices": [{"name": "all", "per_gpu_hour": "2,50"}]}}, "prices/0/per_gpu_hour"),
    (
        {"kafka": {"securityProtocol": "SASL_SSL", "clientCertificates": True}},
        "kafka.securityProtocol: SASL_SSL with kafka.clientCertificates; set it to SSL",
    ),
    ({"bill": {"schedule": "0 3 * *"}}, "/bill/schedule"),
    ({"agent": {"port": 0}}, "/agent/port"),
    ({"agent": {"settings": {"cluster": "other"}}}, "set the value cluster instead"),
    ({"agent": {"settings": {"http": {"listen": ":1"}}}}, "set the value agent.port instead"),
    ({"agent": {"settings": {"no_kafka": False}}}, "agent.settings.no_kafka"),
    ({**CENTRAL, "join": {"replicas": 0}}, "/join/replicas"),
    ({**CENTRAL, "sinks": {"settings": {"store": {"uri": "s3://a"}}}}, "sinks.settings.store.uri"),
    ({**CENTRAL, "sinks": {"settings": {"group": "a"}}}, "sinks.settings.group"),
    ({**CENTRAL, "join": {"settings": {"http": {"listen": "0.0.0.0:9999"}}}}, "join.settings.http"),
    (
        {**CENTRAL, "sinks": {"settings": {"http": {"listen": "0.0.0.0:9999"}}}},
        "sinks.settings.http.listen: the chart sets this setting; remove it",
    ),
    (
        {**CENTRAL, "join": {"settings": {"kafka": {"bootstrap_servers": "a:1"}}}},
        "set the value kafka.bootstrapServers instead",
    ),
    ({"sinks": {"settings": {"alerts": {"urls": ["am"]}}}}, "settings.alerts.urls[0]: invalid"),
    ({"sinks": {"settings": {"remote_write": {"url": "a"}}}}, "remote_write.url: invalid value"),
    (
        {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
        "enable only one",
    ),
    (
        {"prometheusRule": {"enabled": True, "disabled": ["GpuledgerTypo"]}},
        "unknown alert GpuledgerTypo",
    ),
]


@for_each("values,named", MISTAKES)
def test_a_mistake_in_the_values_is_named(
    values: dict[str, Any], named: str, helm: Helm, tmp_path: Path
) -> None:
    with pytest.raises(ToolError) as raised:
        render_chart(values, folder=tmp_path)

    assert named in str(raised.value)


@for_each("name", ["gpu.prod", "2026"])
def test_a_release_whose_name_no_service_can_have_needs_another_prefix(
    name: str, helm: Helm, tmp_path: Path
) -> None:
    with pytest.raises(ToolError, match="fullnameOverride: invalid value"):
        render_chart(folder=tmp_path, name=name)

    render_chart({"fullnameOverride": "ledger"}, folder=tmp_path, name=name)


def test_a_name_that_yaml_reads_as_another_type_remains_a_text(helm: Helm, tmp_path: Path) -> None:
    def texts(name: str, components: str) -> list[str]:
        values = {
            "components": components,
            "cluster": name,
            "fullnameOverride": name,
            "kafka": {"bootstrapServers": "broker:9092", "caSecret": name},
            "http": {"webConfigSecret": name},
            "agent": {"runtimeClassName": name, "priorityClassName": name},
            "central": {"priorityClassName": name},
            "store": {
                "storageClassName": name,
                "serviceAccountName": name,
                "credentialsSecret": name,
            },
            "sinkAlerts": {"credentialsSecret": name},
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "openshift": True,
        }
        objects = render_chart(values, folder=tmp_path, name=name).objects
        return sorted(path for path, _ in strings(objects))

    for components in ("agent", "central"):
        assert texts("on", components) == texts("text", components)


@for_each("number,text", [(67108864, "67108864"), (0.5, "0.5"), ("0.5", "0.5")])
def test_a_number_is_not_rounded(
    number: float | str, text: str, helm: Helm, tmp_path: Path
) -> None:
    values = {
        "kafka": {"env": {"GPULEDGER_OTHER": number}},
        "autoscaling": {"enabled": True, "lagSeconds": number},
    }
    rendering = render_chart(CENTRAL, values, folder=tmp_path)
    config = rendering.get("ConfigMap", "gpuledger-kafka", "gpuledger")

    assert config["data"]["GPULEDGER_OTHER"] == text
    for scaled in rendering.of_kind("ScaledObject"):
        assert scaled["spec"]["triggers"][0]["metadata"]["threshold"] == text


def test_the_image_of_a_release_can_have_a_digest(helm: Helm, tmp_path: Path) -> None:
    tag = f"1.0@sha256:{'0' * 64}"
    agent = render_chart({"image": {"tag": tag}}, folder=tmp_path).workload("gpuledger-agent")

    assert agent.container["image"] == f"gpuledger-agent:{tag}"


def test_a_list_of_metrics_may_begin_with_blanks(helm: Helm, tmp_path: Path) -> None:
    listed = "  DCGM_FI_DEV_GPU_UTIL, gauge, GPU utilization\nDCGM_FI_DEV_GPU_TEMP, gauge, t\n"
    rendering = render_chart({"agent": {"customMetrics": listed}}, folder=tmp_path)
    config = rendering.get("ConfigMap", "gpuledger-agent-settings", "gpuledger-agent")

    assert config["data"]["custom-metrics.csv"].strip("\n") == listed.strip("\n")


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the content of each value that is not a group of values."""
    for key, value in values.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            yield from leaves(value, inner)
        else:
            yield inner, value


def changed(path: str, value: object) -> object:
    """Return another value that the schema accepts."""
    name = path.rpartition(".")[2]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    other = CHANGED.get(path, CHANGED.get(name))
    return other or ({"other": "value"} if isinstance(value, dict) else "other")


def nested(path: str, value: object, place: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with one value at a path of the defaults, whose keys may contain dots."""
    for key, inner in place.items():
        if path == key:
            return {key: value}
        if path.startswith(f"{key}."):
            return {key: nested(path.removeprefix(f"{key}."), value, inner)}
    raise LookupError(path)


@pytest.fixture(scope="module")
def unchanged(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    folder = tmp_path_factory.mktemp("unchanged")
    return {case: render_chart(file, folder=folder).objects for case, file in CASES.items()}


@for_each("path,value", list(leaves(defaults())))
def test_every_value_has_an_effect(
    path: str, value: object, unchanged: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    """In at least one of the values files of ci/."""
    # First the file in which it probably has one.
    central = not path.startswith(("agent", "pod"))
    for case in sorted(CASES, key=lambda case: (case == "central") != central):
        given = yaml.safe_load(CASES[case].read_text())
        present = dict(leaves(merged(defaults(), given))).get(path, value)
        over = nested(path, changed(path, present), defaults())
        try:
            made = render_chart(given, over, folder=tmp_path).objects
        except ToolError:
            continue  # such as two monitors at the same time
        if made != unchanged[case]:
            return
    pytest.fail(f"{path} changes nothing")


def test_every_value_is_described_and_known_to_the_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    schema = json.loads((CHART / "values.schema.json").read_text())

    def described(line: int) -> bool:
        while line and lines[line - 1].lstrip().startswith("#"):
            line -= 1
            if lines[line].lstrip().startswith("# -- "):
                return True
        return False

    def check(node: yaml.MappingNode, known: Mapping[str, Any]) -> None:
        _, _, name = known.get("$ref", "").rpartition("/")
        known = schema["definitions"][name] if name else known
        assert known["additionalProperties"] is False
        assert {key.value for key, _ in node.value} == known["properties"].keys() - {"global"}
        for key, value in node.value:
            if not described(key.start_mark.line):
                assert isinstance(value, yaml.MappingNode), key.value
                check(value, known["properties"][key.value])

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    check(root, schema)


@for_each("case", list(CASES))
def test_helm_has_no_complaint(case: str, helm: Helm) -> None:
    assert helm("lint", "--strict", "--quiet", f"--values={CASES[case]}", CHART) == ""

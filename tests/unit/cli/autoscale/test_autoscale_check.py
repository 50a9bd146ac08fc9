"""`gpuledger autoscale check`: each known mistake is found with its line, and nothing else."""

import io
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest

from gpuledger_cli.__main__ import main
from gpuledger_cli.autoscale.mistakes import MISTAKES
from tests.tables import for_each

BUSY: Final = 'gpuledger_pod_gpu_busy_ratio{namespace="serving"}'
OWNED: Final = (
    f"{BUSY} * on (cluster, node, pod_uid) group_left ()"
    ' gpuledger_pod_info{namespace="serving", owner_kind="Deployment", owner_name="chat"}'
)
SUM: Final = f"sum({OWNED})"
AVERAGE: Final = f"avg({OWNED})"
DCGM: Final = 'DCGM_FI_DEV_GPU_UTIL{exported_namespace="serving", exported_pod="chat-0"}'
QUEUE: Final = "sum(gateway_requests_waiting)"


class Case(NamedTuple):
    """A manifest, and the lines at which each of its mistakes is found."""

    title: str
    manifest: str
    found: Mapping[str, str] = MappingProxyType({})
    """A part of the line to change, by the name of the mistake."""
    options: tuple[str, ...] = ()


def trigger(query: str = SUM, *, above: str = "", **settings: object) -> str:
    metadata = {"query": query, "threshold": "0.7", "ignoreNullValues": "true"} | settings
    lines = [f"    - type: prometheus\n{textwrap.indent(above, ' ' * 6)}      metadata:\n"]
    lines += [
        f"        {name}: {json.dumps(value)}\n"
        for name, value in metadata.items()
        if value is not None
    ]
    return "".join(lines)


def keda(*triggers: str, least: str = "1", kind: str = "ScaledObject", more: str = "") -> str:
    minimum = f"  minReplicaCount: {least}\n" if least else ""
    return (
        f"apiVersion: keda.sh/v1alpha1\nkind: {kind}\n"
        "metadata: {name: chat, namespace: serving}\nspec:\n  scaleTargetRef: {name: chat}\n"
        f"{minimum}{textwrap.indent(more, '  ')}  triggers:\n{''.join(triggers)}"
    )


def hpa(metric: str, value: str, *, least: str = "1", kind: str = "Pods") -> str:
    source = kind.lower()
    return (
        "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {name: chat}\nspec:\n"
        f"  scaleTargetRef: {{kind: Deployment, name: chat}}\n  minReplicas: {least}\n  metrics:\n"
        f"    - type: {kind}\n      {source}:\n        metric: {{name: {metric}}}\n"
        f"        target:\n          type: AverageValue\n          averageValue: {value}\n"
    )


def deployment(resource: str) -> str:
    return (
        "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: chat, namespace: serving}\n"
        "spec:\n  template:\n    spec:\n      containers:\n        - name: server\n"
        f"          resources: {{limits: {{{resource}: 1}}}}\n"
    )


VALUE: Final = "metricType: Value\n"
AVERAGE_VALUE: Final = "metricType: AverageValue\n"
FORMULA: Final = 'advanced: {scalingModifiers: {formula: "a", target: "1"}}\n'
FALLBACK: Final = "fallback: {failureThreshold: 3, replicas: 4}\n"
BY_POD: Final = f"sum by (pod) ({BUSY})"
PATTERN: Final = 'sum(gpuledger_pod_gpu_busy_ratio{namespace="serving", pod=~"chat-.*"})'
TWO_EXPORTERS: Final = f"sum({DCGM}) / 100 + sum({BUSY})"
CASES: Final = (
    Case("an average", keda(trigger(AVERAGE)), {"average-divided-again": "query:"}),
    Case(
        "an average as AverageValue",
        keda(trigger(f"100 * avg by (namespace) ({OWNED})", above=AVERAGE_VALUE, threshold="70")),
        {"average-divided-again": "metricType: AverageValue"},
    ),
    Case(
        "a sum divided by a number of pods as AverageValue",
        keda(trigger(f"{SUM} / count({OWNED})")),
        {"average-divided-again": "query:"},
    ),
    Case(
        "an average with zero for absent pods",
        keda(trigger(f"{AVERAGE} or on () vector(0)", ignoreNullValues=None)),
        {"average-divided-again": "query:"},
    ),
    Case("an average as Value", keda(trigger(AVERAGE, above=VALUE))),
    Case("an average with a formula", keda(trigger(AVERAGE), more=FORMULA)),
    Case("an average times the number of pods", keda(trigger(f"{AVERAGE} * count({OWNED})"))),
    Case("an average of something else", keda(trigger("avg(gateway_requests_waiting)"))),
    Case(
        "the lag of a component",
        keda(trigger('max(gpuledger_join_lag_seconds{cluster="c"})', above=VALUE, threshold="30")),
    ),
    Case("an HPA by the lag of a component", hpa("gpuledger_sink_lag_seconds", "30", least="0")),
    Case("a sum", keda(trigger())),
    Case("a sum as Value", keda(trigger(above=VALUE)), {"sum-as-value": "metricType"}),
    Case(
        "a sum divided by a number of pods", keda(trigger(f"{SUM} / count({OWNED})", above=VALUE))
    ),
    Case("a sum by pod", keda(trigger(BY_POD)), {"several-series": "query:"}),
    Case("a bare series", keda(trigger(BUSY)), {"several-series": "query:"}),
    Case("the series of several pods", keda(trigger(OWNED)), {"several-series": "query:"}),
    Case(
        "a mean over time of each pod",
        keda(trigger(f"avg_over_time({BUSY}[5m])")),
        {"several-series": "query:"},
    ),
    Case(
        "a series recorded by namespace",
        keda(trigger('namespace:gpuledger_pod_gpu_busy_ratio:sum{namespace="serving"}')),
    ),
    Case(
        "a series recorded by namespace, of all namespaces",
        keda(trigger("sum(namespace:gpuledger_pod_gpu_busy_ratio:sum)")),
        {"no-namespace": "query:"},
    ),
    Case(
        "a series recorded by pod",
        keda(trigger('namespace_pod:gpuledger_pod_gpu_busy_ratio:sum{namespace="serving"}')),
        {"several-series": "query:"},
    ),
    Case(
        "a series recorded with one result", keda(trigger("chat:gpuledger_pod_gpu_busy_ratio:sum"))
    ),
    Case(
        "a recorded series of one workload",
        keda(
            trigger(
                "workload:gpuledger_gpu_busy_seconds:rate5m"
                '{namespace="serving", owner_kind="Deployment", owner_name="chat"}'
            )
        ),
    ),
    Case(
        "to zero",
        keda(trigger(activationThreshold="0.05"), least="0"),
        {"no-signal-at-zero": "min"},
    ),
    Case(
        "to zero by default",
        keda(trigger(activationThreshold="0.05"), least=""),
        {"no-signal-at-zero": "triggers:"},
    ),
    Case(
        "to zero with use of the CPU",
        keda(trigger(activationThreshold="0.05"), "    - type: cpu\n", least="0"),
        {"no-signal-at-zero": "min"},
    ),
    Case("to zero by use of the CPU only", keda("    - type: cpu\n", least="0")),
    Case(
        "to zero with a queue", keda(trigger(activationThreshold="0.05"), trigger(QUEUE), least="0")
    ),
    Case(
        "to zero with a queue whose name has GPUs",
        keda(trigger(activationThreshold="0.05"), trigger("sum(gpu_jobs_waiting)"), least="0"),
    ),
    Case(
        "to zero with Kafka",
        keda(trigger(activationThreshold="0.05"), "    - type: kafka\n", least="0"),
    ),
    Case(
        "to zero, or a queue in the same query",
        keda(trigger(f"{SUM} or {QUEUE}", activationThreshold="0.05"), least="0"),
    ),
    Case(
        "to zero with an answer for absent pods",
        keda(trigger(f"{SUM} or vector(1)", activationThreshold="0.05"), least="0"),
    ),
    Case(
        "to zero with zero for absent pods",
        keda(trigger(f"{SUM} or vector(0)", activationThreshold="0.05"), least="0"),
        {"no-signal-at-zero": "min"},
    ),
    Case("jobs", keda(trigger(), least="", kind="ScaledJob"), {"no-signal-at-zero": "triggers:"}),
    Case(
        "an HPA to zero", hpa("pod_gpu_busy_ratio", "700m", least="0"), {"no-signal-at-zero": "min"}
    ),
    Case("an HPA to zero with a queue", hpa("requests", "5", least="0", kind="External")),
    Case(
        "whole GPUs by DCGM",
        keda(trigger(f"sum({DCGM})", threshold="70")) + deployment("nvidia.com/gpu"),
    ),
    Case(
        "stated shared GPUs by DCGM",
        keda(trigger(f"sum({DCGM})", threshold="70")),
        {"shared-gpu": "query:"},
        ("--shared-gpus",),
    ),
    Case("stated shared GPUs by pod", keda(trigger()), options=("--shared-gpus",)),
    *(
        Case(
            f"{resource} by DCGM",
            keda(trigger(f"sum({DCGM})", threshold="70")) + deployment(resource),
            {"shared-gpu": "query:"},
        )
        for resource in ("nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/gpumem")
    ),
    *(
        Case(
            "a shared GPU whose manifests differ in their namespace",
            keda(trigger(f"sum({DCGM})", threshold="70")).replace(scaler, "")
            + deployment("nvidia.com/gpu.shared").replace(workload, ""),
            {"shared-gpu": "query:"},
        )
        for scaler, workload in (
            (", namespace: serving", ""),
            ("", ", namespace: serving"),
            (", namespace: serving",) * 2,
        )
    ),
    Case(
        "a shared GPU in another namespace",
        keda(trigger(f"sum({DCGM})", threshold="70"))
        + deployment("nvidia.com/gpu.shared").replace("namespace: serving", "namespace: other"),
    ),
    Case(
        "an HPA by DCGM",
        hpa("dcgm_fi_dev_gpu_util", "70"),
        {"shared-gpu": "name: dcgm"},
        ("--shared-gpus",),
    ),
    Case("per cent of a ratio", keda(trigger(threshold="70")), {"percent-of-ratio": "threshold"}),
    Case(
        "per cent of a ratio that is 0 without pods",
        keda(trigger(f"{SUM} or 0 * count(gpuledger_gpu_up)", threshold="70")),
        {"percent-of-ratio": "threshold"},
    ),
    Case("per cent of a ratio times 100", keda(trigger(f"{SUM} * 100", threshold="70"))),
    Case(
        "per cent of DCGM divided by 100",
        keda(trigger(f"sum({DCGM}) / 100", threshold="70")),
        {"percent-of-ratio": "threshold"},
    ),
    Case("a pod with 8 GPUs", keda(trigger(threshold="5.6"))),
    Case("a count of busy GPUs", keda(trigger(f"count({OWNED} > 0.5)", threshold="70"))),
    Case("a calculated ratio", keda(trigger(f"sum({BUSY}) - 1", threshold="70"))),
    Case("a ratio of per cent", keda(trigger(f"sum({DCGM})")), {"ratio-of-percent": "threshold"}),
    Case(
        "an HPA in per cent", hpa("pod_gpu_busy_ratio", "70"), {"percent-of-ratio": "averageValue"}
    ),
    Case("an HPA in milli-units", hpa("pod_gpu_busy_ratio", "700m")),
    Case(
        "an HPA by a ratio of DCGM",
        hpa("DCGM_FI_DEV_GPU_UTIL", "700m"),
        {"ratio-of-percent": "averageV"},
    ),
    Case("a pattern of pods", keda(trigger(PATTERN)), {"pod-name-pattern": "query:"}),
    Case(
        "a pattern for any pod",
        keda(trigger('sum(gpuledger_pod_gpu_busy_ratio{namespace="serving", pod=~".+"})')),
    ),
    Case(
        "a pattern with an owner",
        keda(trigger(SUM.replace("{namespace", '{pod=~"chat-.*", namespace'))),
    ),
    Case(
        "no namespace",
        keda(trigger('sum(gpuledger_pod_gpu_busy_ratio{pod="chat-0"})')),
        {"no-namespace": "query:"},
    ),
    Case(
        "an excluded namespace",
        keda(trigger(SUM.replace("namespace=", "namespace!="))),
        {"no-namespace": "query:"},
    ),
    Case(
        "the namespace of a tenant",
        keda(trigger(SUM.replace("namespace=", "x="), namespace="serving")),
    ),
    Case("a GPU", keda(trigger('sum(DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1"})', threshold="70"))),
    Case(
        "no decision on empty answers",
        keda(trigger(ignoreNullValues=None)),
        {"null-values": "metadata:"},
    ),
    Case(
        "a query that is never empty", keda(trigger(f"{SUM} or vector(0)", ignoreNullValues=None))
    ),
    Case(
        "no decision on empty answers at zero",
        keda(trigger(ignoreNullValues=None, activationThreshold="0.05"), trigger(QUEUE), least="0"),
        {"null-values-at-zero": "metadata:"},
    ),
    Case(
        "an empty answer only without monitoring, at zero",
        keda(
            trigger(
                f"{SUM} or 0 * count(gpuledger_gpu_up)",
                ignoreNullValues="false",
                activationThreshold="0.05",
            ),
            trigger(QUEUE),
            least="0",
        ),
    ),
    Case(
        "a fallback at zero",
        keda(
            trigger(ignoreNullValues="false", activationThreshold="0.05"),
            trigger(QUEUE, ignoreNullValues="false"),
            least="0",
            more=FALLBACK,
        ),
        {"fallback-at-zero": "ignoreNullValues"},
    ),
    Case("a fallback with pods", keda(trigger(ignoreNullValues="false"), more=FALLBACK)),
    Case(
        "no activation threshold",
        keda(trigger(), trigger(QUEUE), least="0"),
        {"no-activation": "metadata:"},
    ),
    Case(
        "an activation threshold of 0",
        keda(trigger(activationThreshold="0"), trigger(QUEUE), least="0"),
    ),
    Case(
        "an activation threshold in per cent",
        keda(trigger(activationThreshold="5"), trigger(QUEUE), least="0"),
        {"high-activation": "activationThreshold"},
    ),
    Case("an activation threshold without effect", keda(trigger(activationThreshold="5"))),
    Case("two exporters", keda(trigger(TWO_EXPORTERS)), {"counted-twice": "query:"}),
    Case(
        "two exporters in a union",
        keda(trigger(f"sum({DCGM} or {BUSY})")),
        {"counted-twice": "query:"},
    ),
    Case(
        "two exporters by name",
        keda(trigger('sum({__name__=~"DCGM_FI_DEV_GPU_UTIL|hami_core_util", namespace="a"})')),
        {"counted-twice": "query:"},
    ),
    Case("one exporter, or else the other", keda(trigger(f"sum({BUSY}) or sum({DCGM})"))),
    Case("two series of one exporter", keda(trigger(f"sum({BUSY}) + sum({BUSY})"))),
)


def found_in(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(case.manifest.encode())))
    code = main(["autoscale", "check", "-", "--format", "json", *case.options])
    return code, json.loads(capsys.readouterr().out)["mistakes"]


@for_each("case", CASES)
def test_each_mistake_is_found_at_the_line_to_change_and_nothing_else(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = found_in(case, capsys, monkeypatch)

    assert {one["mistake"] for one in found} == case.found.keys()
    lines = case.manifest.splitlines()
    assert [one for one in found if case.found[one["mistake"]] not in lines[one["line"] - 1]] == []
    assert code == (1 if case.found else 0)


def test_each_known_mistake_has_an_example() -> None:
    assert {name for case in CASES for name in case.found} == {one.name for one in MISTAKES}


def files(folder: Path) -> Iterator[str]:
    for number, text in enumerate((keda(trigger(AVERAGE)), hpa("pod_gpu_busy_ratio", "70"))):
        file = folder / f"{number}.yaml"
        file.write_text(text)
        yield str(file)


def test_the_text_names_file_line_object_problem_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(files(tmp_path))
    assert main(["autoscale", "check", *names]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{names[0]}:10: ScaledObject serving/chat: average-divided-again"
    assert lines[1].startswith("  The metricType AverageValue divides an average")
    assert lines[2] == "  Fix: Use sum(…), or set metricType: Value."
    assert lines[3].startswith(f"{names[1]}:13: HorizontalPodAutoscaler default/chat: percent")
    assert lines[-1] == "2 autoscalers: 2 mistakes found"


def test_objects_in_a_list_are_read_with_their_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    item = textwrap.indent(keda(trigger(AVERAGE)), "  ").replace("  api", "- api", 1)
    case = Case("a list", f"kind: List\nitems:\n{item}")
    _, (found,) = found_in(case, capsys, monkeypatch)
    assert "query:" in case.manifest.splitlines()[found["line"] - 1]


def test_the_hpa_of_a_scaled_object_is_not_another_autoscaler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = "ownerReferences: [{kind: ScaledObject, name: chat}]"
    made = hpa("gpu_busy_ratio", "70").replace("{name: chat}", f"{{name: keda, {owner}}}", 1)
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(f"{keda(trigger())}---\n{made}".encode()))
    )

    assert main(["autoscale", "check", "-"]) == 0
    assert capsys.readouterr().out == "1 autoscaler: no mistakes found\n"


def test_merged_settings_count(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = keda(trigger(ignoreNullValues=None)).replace(
        "        query", '        <<: {ignoreNullValues: "false"}\n        query'
    )
    assert found_in(Case("merged", merged), capsys, monkeypatch) == (0, [])


def test_of_several_merged_settings_the_first_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = keda(trigger(threshold=None)).replace(
        "        query", '        <<: [{threshold: "0.7"}, {threshold: "70"}]\n        query'
    )
    assert found_in(Case("merged", merged), capsys, monkeypatch) == (0, [])


def test_the_objects_in_a_list_of_the_api_have_its_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    item = hpa("pod_gpu_busy_ratio", "70").replace("kind: HorizontalPodAutoscaler\n", "", 1)
    item = textwrap.indent(item, "  ").replace("  api", "- api", 1)
    case = Case("a list", f"kind: HorizontalPodAutoscalerList\nitems:\n{item}")
    _, (found,) = found_in(case, capsys, monkeypatch)
    assert (found["kind"], found["mistake"]) == ("HorizontalPodAutoscaler", "percent-of-ratio")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: Service\n", "no ScaledObject, ScaledJob or HorizontalPodAutoscaler"),
        ("", "no ScaledObject"),
        ("kind: [\n", "invalid YAML"),
        ("kind: ScaledObject\nspec: {{ .Values.x }}\n", ":2: ScaledObject without spec.triggers"),
        ("[" * 2_000, "nested too deep"),
    ],
)
def test_a_file_without_an_autoscaler_is_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert main(["autoscale", "check", str(file)]) == 2

    error = capsys.readouterr().err
    assert str(file) in error
    assert message in error
    assert error.count("\n") == 1


def test_a_missing_file_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["autoscale", "check", "/absent.yaml"]) == 2
    assert (
        capsys.readouterr().err
        == "gpuledger: cannot read /absent.yaml: No such file or directory\n"
    )


@for_each("argument", ("--fromat", "-x"))
def test_an_unknown_option_is_not_taken_as_a_file(
    argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autoscale", "check", "-", argument]) == 2
    assert f"unknown option: {argument};" in capsys.readouterr().err

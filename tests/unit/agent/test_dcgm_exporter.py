"""Settings of a dcgm-exporter DaemonSet keep their meaning if the agent has a counterpart."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import load_settings
from gpuledger_agent.dcgm_exporter import FLAGS, read_swap
from gpuledger_agent.settings import AgentSettings
from tests.errors import has_words
from tests.unit.deployment.components import ROOT

# The arguments and environment of dcgm-exporter's chart with its default values.
CHART_ARGS = ["-f", "/etc/dcgm-exporter/dcp-metrics-included.csv"]
CHART_ENV = {
    "DCGM_EXPORTER_KUBERNETES": "true",
    "DCGM_EXPORTER_LISTEN": ":9400",
    "NODE_NAME": "node-1",
}


# All flags of dcgm-exporter 4.8.4 with their short names.
ALL_FLAGS = """
a address c clock-events-count-window-size collect-interval collectors config-file configmap-data
container-labels container-runtime-socket cpu-devices d dcgm-log-level debug devices
disable-startup-validate dump-compression dump-directory dump-enabled dump-retention
enable-dcgm-log enable-exporter-metrics enable-gpu-bind-unbind-watch enable-pprof f fake-gpus
gpu-bind-unbind-poll-interval health-require-gpus hpc-job-mapping-dir k kubernetes
kubernetes-enable-dra kubernetes-enable-pod-labels kubernetes-enable-pod-uid kubernetes-gpu-id-type
kubernetes-pod-label-allowlist-regex kubernetes-virtual-gpus log-format m max-concurrent-scrapes n
no-hostname nvidia-resource-names o p pod-resources-kubelet-socket r rbmn remote-hostengine-info
replace-blanks-in-model-name s switch-devices use-old-namespace watch-max-keep-age
watch-max-keep-samples web-config-file web-read-timeout web-systemd-socket web-write-timeout x
xid-count-window-size
"""


def load(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> AgentSettings:
    environ = environ or {}
    swap = read_swap(argv, environ)
    return load_settings(
        AgentSettings,
        prog="p",
        description="",
        argv=swap.argv,
        environ=environ,
        complete=swap.complete,
    )


def test_the_charts_own_arguments_start_an_exporter_without_kafka() -> None:
    loaded = load(CHART_ARGS, CHART_ENV)
    assert loaded.no_kafka
    assert loaded.http.listen == ":9400"
    assert loaded.exposition.counters_file is None
    assert loaded.kubelet.enabled == "auto"
    assert read_swap(CHART_ARGS, CHART_ENV).without_effect == []


def test_without_settings_of_dcgm_exporter_nothing_changes() -> None:
    assert load() == AgentSettings()


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["-k"], {}),
        ([], {"DCGM_EXPORTER_KUBERNETES": "true"}),
        ([], {"DCGM_REMOTE_HOSTENGINE_INFO": "localhost:5555"}),
    ],
)
def test_any_setting_that_only_dcgm_exporter_has_selects_its_port(
    argv: list[str], environ: dict[str, str]
) -> None:
    loaded = load(argv, environ)
    assert loaded.http.listen == "0.0.0.0:9400"
    assert loaded.no_kafka


@pytest.mark.parametrize(
    "environ",
    [
        {"NVIDIA_RESOURCE_NAMES": "nvidia.com/a100"},
        {"DCGM_EXPORTER_PORT": "tcp://10.0.0.1:9400", "DCGM_EXPORTER_SERVICE_HOST": "10.0.0.1"},
        {"DCGM_EXPORTER_PORT_9400_TCP_ADDR": "10.0.0.1"},
        {"DCGM_EXPORTER_METRICS_SERVICE_PORT_HTTP": "9400", "DCGM_EXPORTER_METRICS_PORT": "x"},
        {"DCGM_EXPORTER_LISTEN": ""},
    ],
)
def test_settings_that_other_programs_share_do_not_start_an_exporter(
    environ: dict[str, str],
) -> None:
    loaded = load([], environ)
    assert loaded.http.listen == AgentSettings().http.listen
    assert not loaded.no_kafka
    assert read_swap([], environ).without_effect == []


def test_an_exporter_with_brokers_publishes_to_them() -> None:
    environ = {**CHART_ENV, "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": "kafka:9092"}
    loaded = load(CHART_ARGS, environ)
    assert not loaded.no_kafka
    assert loaded.http.listen == ":9400"


def test_an_exporter_with_brokers_in_the_settings_file_publishes_to_them(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("kafka: {bootstrap_servers: 'kafka:9092'}\n")
    assert not load([*CHART_ARGS, "--config", str(file)], CHART_ENV).no_kafka


def test_gpuledgers_own_settings_take_precedence() -> None:
    environ = {**CHART_ENV, "GPULEDGER_HTTP__LISTEN": "127.0.0.1:1", "GPULEDGER_NO_KAFKA": "false"}
    loaded = load(CHART_ARGS, environ)
    assert loaded.http.listen == "127.0.0.1:1"
    assert not loaded.no_kafka


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        (["-f", "/list.csv"], "exposition.counters_file", Path("/list.csv")),
        (["--collectors=/list.csv"], "exposition.counters_file", Path("/list.csv")),
        (["-f=/list.csv"], "exposition.counters_file", Path("/list.csv")),
        (["-collectors", "/list.csv"], "exposition.counters_file", Path("/list.csv")),
        (["-a", ":9401"], "http.listen", ":9401"),
        (["--address", "[::]:9400"], "http.listen", "[::]:9400"),
        (["-k"], "kubelet.enabled", "auto"),
        (["--kubernetes=false"], "kubelet.enabled", False),
        (["--kubernetes-virtual-gpus"], "exposition.pod_series", True),
        (["-n"], "exposition.host_label", "none"),
        (["--no-hostname=0"], "exposition.host_label", "hostname"),
        (["--pod-resources-kubelet-socket", "/k.sock"], "kubelet.socket", Path("/k.sock")),
        (["--hpc-job-mapping-dir", "/run/gpu-jobs"], "job_mapping_dir", Path("/run/gpu-jobs")),
        (["--web-config-file", "/web.yaml"], "http.web_config_file", Path("/web.yaml")),
        (["-x", "60000"], "exposition.event_window_seconds", 60.0),
        (["--clock-events-count-window-size=1500"], "exposition.event_window_seconds", 1.5),
        (["--kubernetes-enable-pod-uid"], "exposition.dcgm_pod_uid", True),
        (["-rbmn"], "exposition.dashes_in_model_name", True),
        (["--debug"], "log.level", "debug"),
        (["--log-format", "text"], "log.format", "text"),
        (["--kubernetes-enable-pod-labels"], "exposition.dcgm_pod_labels", True),
        (
            ["--kubernetes-pod-label-allowlist-regex", r"^app$,^kueue\.x-k8s\.io/.*$"],
            "exposition.dcgm_pod_label_patterns",
            ("^app$", r"^kueue\.x-k8s\.io/.*$"),
        ),
        (["-d", "f"], "exposition.dcgm_devices", "f"),
        (["--devices=g:0,2-3"], "exposition.dcgm_devices", "g:0,2-3"),
        (["-o"], "exposition.dcgm_old_labels", True),
        (["--use-old-namespace=false"], "exposition.dcgm_old_labels", False),
        (["-c", "500"], "sampling_interval_seconds", 0.5),
        (["-c", "500"], "readings_seconds", 0.5),
        (["--collect-interval=500"], "health_seconds", 1.0),
        (["-c", "100"], "sampling_interval_seconds", 0.25),
        (["-c", "2000"], "sampling_interval_seconds", 1.0),
        (["-c", "2000"], "readings_seconds", 2.0),
        (["-c", "30000"], "readings_seconds", 5.0),
        (["-c", "30000"], "health_seconds", 10.0),
    ],
)
def test_a_flag_with_a_counterpart_sets_it(words: list[str], setting: str, value: object) -> None:
    found: object = load(words)
    for name in setting.split("."):
        found = getattr(found, name)
    assert found == value
    assert read_swap(words, {}).without_effect == []


def test_resource_names_are_added_to_the_known_ones() -> None:
    names = load(["--nvidia-resource-names", "nvidia.com/a100,nvidia.com/a10"]).kubelet
    assert names.resource_names[-2:] == ("nvidia.com/a100", "nvidia.com/a10")
    assert names.resource_names[:-2] == AgentSettings().kubelet.resource_names


def test_a_flag_overrides_its_variable() -> None:
    loaded = load(["-a", ":1"], {"DCGM_EXPORTER_LISTEN": ":2", "DCGM_EXPORTER_NO_HOSTNAME": "1"})
    assert loaded.http.listen == ":1"
    assert loaded.exposition.host_label == "none"


def test_a_flag_with_the_default_value_overrides_its_variable_too() -> None:
    environ = {"DCGM_EXPORTER_NO_HOSTNAME": "1", "DCGM_EXPORTER_COLLECTORS": "/list.csv"}
    loaded = load([*CHART_ARGS, "--no-hostname=false"], environ)
    assert loaded.exposition.host_label == "hostname"
    assert loaded.exposition.counters_file is None


@pytest.mark.parametrize("path", ["default-counters.csv", "dcp-metrics-included.csv"])
def test_the_lists_of_dcgm_exporters_own_image_are_built_in(path: str) -> None:
    loaded = load(["-f", f"/etc/dcgm-exporter/{path}"])
    assert loaded.exposition.counters_file is None


def test_a_list_mounted_at_the_default_path_is_read_without_a_flag(tmp_path: Path) -> None:
    counters = tmp_path / "default-counters.csv"
    counters.touch()

    def listed(*argv: str) -> object:
        swap = read_swap(argv, {"DCGM_EXPORTER_KUBERNETES": "true"}, lists=tmp_path)
        found = swap.layer.get(("exposition", "counters_file"))
        return found.value if found else None

    assert listed() == str(counters)
    assert listed("-f", "/list.csv") == "/list.csv"
    assert read_swap([], {}, lists=tmp_path).layer == {}


def test_any_other_missing_list_is_not_replaced_by_a_built_in_one() -> None:
    missing = "/etc/dcgm-exporter/dcgm-metrics.csv"
    assert load(["-f", missing]).exposition.counters_file == Path(missing)


def test_settings_without_a_counterpart_are_reported_and_ignored() -> None:
    argv = ["-r", "host:5555", "-d", "i:0,2", "-s", "g"]
    argv += ["-f", "/etc/dcgm-exporter/1.x-compatibility-metrics.csv", "-n", "1"]
    environ = {
        "DCGM_EXPORTER_CONTAINER_LABELS": "true",
        "DCGM_EXPORTER_SOMETHING_NEW": "1",
        "DCGM_EXPORTER_DUMP_ENABLED": "false",
        "DCGM_EXPORTER_CONFIGMAP_DATA": "none",
    }
    load(argv, environ)
    assert sorted(read_swap(argv, environ).without_effect) == [
        "-d",
        "-f",
        "-n 1",
        "-r",
        "-s",
        "DCGM_EXPORTER_CONTAINER_LABELS",
        "DCGM_EXPORTER_SOMETHING_NEW",
    ]


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["-a", "nine"], {}, "-a: expected host:port such as 0.0.0.0:9820, got 'nine'"),
        ([], {"DCGM_EXPORTER_LISTEN": "9400"}, "DCGM_EXPORTER_LISTEN: expected host:port"),
        (["-x", "0"], {}, "-x: expected a number > 0"),
        (["-x", "5m"], {}, "-x: expected a number"),
        (["--kubernetes=yes"], {}, "--kubernetes: expected true or false, got 'yes'"),
        ([], {"KUBERNETES_VIRTUAL_GPUS": "on"}, "KUBERNETES_VIRTUAL_GPUS: expected true or"),
        (["--log-format=xml"], {}, "--log-format: expected"),
        (["-f"], {}, "-f: expected a value"),
        (["--kubernetes-pod-label-allowlist-regex=("], {}, "allowlist-regex: '(': missing )"),
        (["--kubernetes-pod-label-allowlist-regex", "(" * 20_000], {}, "allowlist-regex: '(((("),
        (["--kubernetes-pod-label-allowlist-regex", "a{" + "9" * 20 + "}"], {}, "regex: 'a{9"),
        (["-c", "9" * 30_000], {}, "-c: "),
        (["-c", "9" * 400], {}, "-c: expected milliseconds > 0, got '999"),
        (["-x", "9" * 400], {}, "-x: "),
        (["-c", "30s"], {}, "-c: expected milliseconds > 0, got '30s'"),
        ([], {"DCGM_EXPORTER_INTERVAL": "0"}, "DCGM_EXPORTER_INTERVAL: expected milliseconds > 0"),
        (["-d", "h"], {}, "-d: expected f, g, i, g+i or GPUs such as g:0,2-3, got 'h'"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_name_of_its_setting(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(argv, environ)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_switch_does_not_take_the_next_word_as_its_value() -> None:
    swap = read_swap(["-k", "false", "-n", "--source", "simulated"], {})
    assert swap.without_effect == ["-k false"]
    assert swap.argv == ["--source", "simulated"]
    loaded = load(["-k", "false", "-n"])
    assert loaded.kubelet.enabled == "auto"
    assert loaded.exposition.host_label == "none"


def test_the_agents_image_requests_all_gpus_as_dcgm_exporters_image_does() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stage = text.partition("FROM runtime AS agent\n")[2].partition("\nFROM ")[0]
    assert "ENV NVIDIA_VISIBLE_DEVICES=all" in stage.splitlines()
    assert "ENV NVIDIA_DRIVER_CAPABILITIES=utility" in stage.splitlines()


def test_an_unknown_flag_is_rejected() -> None:
    with pytest.raises(SettingsError, check=has_words("--nonsense")):
        load([*CHART_ARGS, "--nonsense"], CHART_ENV)


def test_every_flag_can_be_given_by_each_of_its_names() -> None:
    names = [name for flag in FLAGS for name in flag.names.split()]
    assert sorted(names) == ALL_FLAGS.split()
    variables = [flag.variable for flag in FLAGS]
    assert len(variables) == len(set(variables))


def test_the_program_reports_an_invalid_value_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpuledger_agent", "-a", "nine"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "-a: expected host:port such as 0.0.0.0:9820, got 'nine'" in done.stderr

"""Reads settings from dcgm-exporter's flags and variables.

A user can thus replace dcgm-exporter by changing only the image in its DaemonSet.

gpuledger's own settings take precedence. If gpuledger has no setting that corresponds to a flag or
variable, the flag or variable has no effect and a warning names it. Only values that have an effect
are validated.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Final, NamedTuple

from gpuledger.errors import SettingsError
from gpuledger.settings.sources import Given, Layer
from gpuledger.texts import shorten
from gpuledger_agent.settings import AgentSettings, KubeletSettings

_LISTEN: Final = "0.0.0.0:9400"  # dcgm-exporter's default
_PREFIX: Final = "DCGM_EXPORTER_"
# Variables that Kubernetes sets in each container of a namespace with a Service called
# dcgm-exporter.
_SERVICE_LINK: Final = re.compile(r"DCGM_EXPORTER_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
_FALSE: Final = ("0", "f", "F", "FALSE", "false", "False")
# Values that request nothing.
_IDLE: Final = (*_FALSE, "none", "NONE")
_WHOLE: Final = re.compile(r"[0-9]{1,18}")  # dcgm-exporter has 64 bits
_LISTS: Final = Path("/etc/dcgm-exporter")
_SHOWN_CHARACTERS: Final = 80
_DEFAULT_LIST: Final = "default-counters.csv"
# Settings of intervals in seconds, with their minimums.
_INTERVALS: Final = (
    ("sampling_interval_seconds", 0.25),
    ("readings_seconds", 0.25),
    ("health_seconds", 1.0),
)

Meaning = Mapping[str, str] | None
"""The gpuledger settings, with values, that replace a flag of dcgm-exporter; empty if the agent
needs no setting to do the same; `None` if the agent cannot do what the flag requests."""


def ignore(value: str) -> Meaning:
    """Return `None`, because the agent has no such function, or {} if the value switches it off."""
    return {} if value in _IDLE else None


def accept(_: str) -> Meaning:
    """Return no settings, because the agent always does what the flag requests."""
    return {}


def sets(setting: str) -> Callable[[str], Meaning]:
    """Return a function that gives the flag's value to the named setting."""
    return lambda value: {setting: value}


def turns(setting: str, on: str) -> Callable[[str], Meaning]:
    """Return a function that gives the named setting the value `on` if the flag is true."""
    return lambda value: {setting: on} if value in _TRUE else {}


def read_milliseconds(value: str) -> Meaning:
    """Return `exposition.event_window_seconds`, converted from the flag's milliseconds."""
    return {"exposition.event_window_seconds": f"{value}e-3"}


def read_interval(value: str) -> Meaning:
    """Return the settings of intervals whose defaults are longer than the flag's interval.

    The flag is in milliseconds. A setting is never shorter than its minimum.
    """
    if not _WHOLE.fullmatch(value) or not int(value):
        raise ValueError(f"expected milliseconds > 0, got {shorten(value, _SHOWN_CHARACTERS)!r}")
    seconds = int(value) / 1000
    return {
        name: f"{max(seconds, shortest):g}"
        for name, shortest in _INTERVALS
        if seconds < getattr(AgentSettings(), name)
    }


def read_devices(value: str) -> Meaning:
    """Return `exposition.dcgm_devices`; `None` if the flag selects MIG instances by number."""
    return None if "i:" in value else {"exposition.dcgm_devices": value}


def read_counters_file(value: str) -> Meaning:
    """Return `exposition.counters_file`, the file that lists the metrics to show.

    The agent has the lists of dcgm-exporter's image built in. If the flag names one of them and the
    file does not exist, return no setting. Return `None` for the image's list of metric names of
    dcgm-exporter 1.x, which the agent does not have.
    """
    file = Path(value)
    if file.parent == _LISTS and not file.exists():
        if file.name in {_DEFAULT_LIST, "dcp-metrics-included.csv"}:
            return {}
        if file.name == "1.x-compatibility-metrics.csv":
            return None
    return {"exposition.counters_file": value}


def read_resource_names(value: str) -> Meaning:
    """Return `kubelet.resource_names` with the default names and the flag's value."""
    return {"kubelet.resource_names": ",".join((*KubeletSettings().resource_names, value))}


class Flag(NamedTuple):
    """A flag of dcgm-exporter: its names without dashes, its effect here, and its variable."""

    names: str
    read: Callable[[str], Meaning] = ignore
    own_variable: str = ""
    meaning: str = "no effect"
    """The flag's effect in gpuledger, as Markdown for the documentation."""

    @property
    def variable(self) -> str:
        """The name of the flag's environment variable, which usually resembles the flag's name."""
        name = self.names.split()[0].upper().replace("-", "_")
        return self.own_variable or f"{_PREFIX}{name}"


SWITCHES: Final = (
    Flag(
        "kubernetes k",
        lambda value: {"kubelet.enabled": "auto" if value in _TRUE else "false"},
        meaning="`kubelet.enabled`: `auto` if the flag is true, otherwise `false`. **Differs:**"
        " without the flag, the agent queries the kubelet if the kubelet's socket exists",
    ),
    Flag(
        "kubernetes-enable-pod-uid",
        turns("exposition.dcgm_pod_uid", "true"),
        meaning="`exposition.dcgm_pod_uid`",
    ),
    Flag(
        "kubernetes-virtual-gpus",
        turns("exposition.pod_series", "true"),
        "KUBERNETES_VIRTUAL_GPUS",
        "`exposition.pod_series`. **Differs:** three metrics have each pod's own part of a shared"
        " GPU; dcgm-exporter copies the device's values to each pod in all metrics",
    ),
    Flag(
        "kubernetes-enable-dra",
        accept,
        "KUBERNETES_ENABLE_DRA",
        "always on. **Differs:** there are no `dra_…` labels",
    ),
    Flag(
        "no-hostname n",
        turns("exposition.host_label", "none"),
        meaning="`exposition.host_label: none`",
    ),
    Flag(
        "fake-gpus",
        ignore,
        "DCGM_EXPORTER_USE_FAKE_GPUS",
        "no effect: use `--source simulated`",
    ),
    Flag("web-systemd-socket", ignore, "DCGM_EXPORTER_SYSTEMD_SOCKET"),
    Flag(
        "replace-blanks-in-model-name rbmn",
        turns("exposition.dashes_in_model_name", "true"),
        meaning="`exposition.dashes_in_model_name`",
    ),
    Flag("debug", turns("log.level", "debug"), meaning="`log.level: debug`"),
    Flag("disable-startup-validate", ignore, "DISABLE_STARTUP_VALIDATE"),
    Flag("enable-gpu-bind-unbind-watch", accept, meaning="always on"),
    Flag(
        "use-old-namespace o",
        turns("exposition.dcgm_old_labels", "true"),
        meaning="`exposition.dcgm_old_labels`. **Differs:** in a list of metrics, names of 1.x have"
        " no effect",
    ),
    Flag(
        "kubernetes-enable-pod-labels",
        turns("exposition.dcgm_pod_labels", "true"),
        meaning="`exposition.dcgm_pod_labels`. **Differs:** the agent needs"
        " [access to the kubelet]"
        "(../guides/labels-and-teams.md#show-pod-labels-on-the-agents-metrics)",
    ),
    *map(Flag, ("container-labels", "enable-dcgm-log", "dump-enabled", "dump-compression")),
    *map(Flag, ("enable-pprof", "enable-exporter-metrics", "health-require-gpus")),
)
# If two flags set one setting, the flag that is later in this list takes precedence.
FLAGS: Final = (
    *SWITCHES,
    Flag(
        "collectors f",
        read_counters_file,
        meaning="`exposition.counters_file`, by default `/etc/dcgm-exporter/default-counters.csv`;"
        " this list and `dcp-metrics-included.csv` in the same directory are built in and used if"
        " the file does not exist",
    ),
    Flag("address a", sets("http.listen"), "DCGM_EXPORTER_LISTEN", "`http.listen`"),
    Flag(
        "collect-interval c",
        read_interval,
        "DCGM_EXPORTER_INTERVAL",
        "`sampling_interval_seconds`, `readings_seconds` and `health_seconds`, if the interval is"
        " shorter than their defaults; at least 250 ms, for health 1 s",
    ),
    Flag("kubernetes-gpu-id-type", accept, meaning="the agent accepts both types with any value"),
    Flag(
        "nvidia-resource-names",
        read_resource_names,
        "NVIDIA_RESOURCE_NAMES",
        "added to `kubelet.resource_names`",
    ),
    Flag(
        "pod-resources-kubelet-socket",
        sets("kubelet.socket"),
        "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        "`kubelet.socket`",
    ),
    Flag(
        "devices d",
        read_devices,
        "DCGM_EXPORTER_DEVICES_STR",
        "`exposition.dcgm_devices`. **Differs:** `g+i` means the same as `f`; numbers of MIG"
        " instances, such as `i:0`, have no effect",
    ),
    Flag(
        "switch-devices s",
        ignore,
        "DCGM_EXPORTER_OTHER_DEVICES_STR",
        "no effect: switches are not shown",
    ),
    Flag("cpu-devices p", ignore, "DCGM_EXPORTER_CPU_DEVICES_STR", "no effect: CPUs are not shown"),
    Flag(
        "remote-hostengine-info r",
        ignore,
        "DCGM_REMOTE_HOSTENGINE_INFO",
        "no effect: the agent queries the driver, not DCGM",
    ),
    Flag("web-config-file", sets("http.web_config_file"), meaning="`http.web_config_file`"),
    Flag(
        "clock-events-count-window-size",
        read_milliseconds,
        meaning="`exposition.event_window_seconds`. **Differs:** there is only one window; the flag"
        " for XIDs has priority",
    ),
    Flag(
        "xid-count-window-size x",
        read_milliseconds,
        meaning="`exposition.event_window_seconds`, for at most the last 1000 events of a GPU."
        " **Differs:** 0 and negative values are invalid",
    ),
    Flag(
        "log-format", sets("log.format"), meaning="`log.format`. **Differs:** the default is JSON"
    ),
    Flag(
        "hpc-job-mapping-dir",
        sets("job_mapping_dir"),
        "DCGM_HPC_JOB_MAPPING_DIR",
        "`job_mapping_dir`",
    ),
    Flag("container-runtime-socket", ignore, "DCGM_CONTAINER_RUNTIME_SOCKET"),
    *map(Flag, ("web-read-timeout", "web-write-timeout", "dcgm-log-level", "config-file")),
    *map(Flag, ("dump-directory", "dump-retention", "gpu-bind-unbind-poll-interval")),
    *map(Flag, ("max-concurrent-scrapes", "watch-max-keep-age", "watch-max-keep-samples")),
    Flag(
        "configmap-data m",
        meaning="no effect: mount the ConfigMap and pass the file with `-f`",
    ),
    Flag(
        "kubernetes-pod-label-allowlist-regex",
        sets("exposition.dcgm_pod_label_patterns"),
        meaning="`exposition.dcgm_pod_label_patterns`",
    ),
)
_BY_NAME: Final = {name: flag for flag in FLAGS for name in flag.names.split()}


@dataclass(kw_only=True)
class Swap:
    """The settings that dcgm-exporter's flags and variables contain, and all other arguments."""

    argv: list[str] = field(default_factory=list)
    """The arguments that are not flags of dcgm-exporter."""
    layer: dict[tuple[str, ...], Given] = field(default_factory=dict)
    """The gpuledger settings that the flags and variables replace, with values, by path."""
    without_effect: list[str] = field(default_factory=list)
    """The flags and variables that have no effect in gpuledger."""
    is_requested: bool = False
    """Whether a flag or variable was given that belongs only to dcgm-exporter."""

    def complete(self, given: Layer) -> Layer:
        """Return the settings that apply unless gpuledger's own settings override them.

        If the agent replaces dcgm-exporter (`is_requested`), the returned settings include
        dcgm-exporter's listen address. `given` are gpuledger's own settings. If they contain no
        Kafka server, the returned settings switch publishing off.
        """
        if not self.is_requested:
            return self.layer
        make = partial(Given, origin="implied by dcgm-exporter's settings", is_text=True)
        implied: Layer = {("http", "listen"): make(value=_LISTEN)}
        if ("kafka", "bootstrap_servers") not in given:
            implied = {**implied, ("no_kafka",): make(value="true")}
        return {**implied, **self.layer}


def read_swap(argv: Sequence[str], environ: Mapping[str, str], *, lists: Path = _LISTS) -> Swap:
    """Return the settings in dcgm-exporter's flags and variables; flags take precedence.

    `lists` is the directory with dcgm-exporter's default list of metrics, which may be mounted.
    Raise `SettingsError` if a flag has no value or a switch is neither true nor false.
    """
    unknown = {name for name in environ if name.startswith(_PREFIX)} - {f.variable for f in FLAGS}
    swap = Swap(without_effect=sorted(filterfalse(_SERVICE_LINK.fullmatch, unknown)))
    variables = {flag: (environ.get(flag.variable, ""), flag.variable) for flag in FLAGS}
    given = {flag: pair for flag, pair in variables.items() if pair[0]}
    # Variables such as NVIDIA_RESOURCE_NAMES belong to other programs too.
    swap.is_requested = any(flag.variable.startswith("DCGM_") for flag in given)
    for flag, value, origin in take_flags(argv, swap):
        given[flag] = (value, origin)
        swap.is_requested = True
    if swap.is_requested:
        default = lists / _DEFAULT_LIST
        given.setdefault(_BY_NAME["collectors"], (str(default), f"default {default}"))
    for flag in filter(given.__contains__, FLAGS):
        value, origin = given[flag]
        if flag in SWITCHES and value not in (*_TRUE, *_FALSE):
            raise SettingsError(f"{origin}: expected true or false, got {value!r}")
        try:
            meaning = flag.read(value)
        except ValueError as error:
            raise SettingsError(f"{origin}: {error}") from error
        if meaning is None:
            swap.without_effect.append(origin)
        for name, text in (meaning or {}).items():
            swap.layer[tuple(name.split("."))] = Given(value=text, origin=origin, is_text=True)
    return swap


def take_flags(argv: Sequence[str], swap: Swap) -> Iterator[tuple[Flag, str, str]]:
    """Yield each flag with its value and its name as given; put other arguments into `swap.argv`.

    The value of a flag follows `=`, or is the next word. A switch without `=` is true, and a word
    that follows it is added to `swap.without_effect`. Raise `SettingsError` if a value is missing.
    """
    words = deque(argv)
    while words:
        word = words.popleft()
        written, equals, value = word.partition("=")
        flag = _BY_NAME.get(written.lstrip("-")) if word.startswith("-") else None
        if flag is None:
            swap.argv.append(word)
        elif equals:
            yield flag, value, written
        elif flag in SWITCHES:
            yield flag, "true", written
            if words and not words[0].startswith("-"):
                swap.without_effect.append(f"{written} {words.popleft()}")
        elif words:
            yield flag, words.popleft(), written
        else:
            raise SettingsError(f"{written}: expected a value")

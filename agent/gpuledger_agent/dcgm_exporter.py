"""dcgm-exporter's flags and variables, as far as this agent has a counterpart for them.

A command line and an environment in, settings out. So a DaemonSet of dcgm-exporter needs another
image and nothing else. They count where gpuledger's own settings say nothing; what has no
counterpart is accepted and named, so that a swap never fails for want of it. A value that
dcgm-exporter itself would refuse is refused.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from gpuledger.errors import SettingsError
from gpuledger.settings.groups import parse_listen
from gpuledger.settings.sources import Given, Layer
from gpuledger_agent.settings import KubeletSettings

_LISTEN: Final = "0.0.0.0:9400"  # where dcgm-exporter listens without a setting
_PREFIX: Final = "DCGM_EXPORTER_"
# Put into each container of a namespace with a Service called dcgm-exporter; nobody's settings.
_SERVICE_LINK: Final = re.compile(r"DCGM_EXPORTER_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
_MAX_INT: Final = 2**63 - 1  # a flag of Go's type int takes no more
_MAX_DIGITS: Final = 100  # zeros in front count
# As Go's strconv.ParseBool takes them.
_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
_FALSE: Final = ("0", "f", "F", "FALSE", "false", "False")
_DEFAULT_LISTS: Final = (
    "/etc/dcgm-exporter/default-counters.csv",
    "/etc/dcgm-exporter/dcp-metrics-included.csv",
)
_OLD_LIST: Final = "/etc/dcgm-exporter/1.x-compatibility-metrics.csv"

Meaning = Mapping[str, str] | None
"""Settings with their values; `None` where this value has no counterpart."""
AS_IT_IS: Final[Mapping[str, str]] = {}
"""The agent does so anyway."""


class Form(NamedTuple):
    """Which values a flag takes."""

    expected: str
    """What they are, for who gave another."""
    fits: Callable[[str], object]
    """Tells them from others; dcgm-exporter would refuse those."""


def is_milliseconds(value: str) -> bool:
    """Return whether a value is a length of time as dcgm-exporter takes one."""
    is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS
    return is_number and 0 < int(value) <= _MAX_INT


def is_address(value: str) -> bool:
    """Return whether a value is an address to listen on."""
    try:
        parse_listen(value)
    except ValueError:
        return False
    return True


TEXT: Final = Form("a text", lambda _: True)
SWITCH: Final = Form("true or false", (*_TRUE, *_FALSE).__contains__)
"""Of a flag that takes no next word."""
MILLISECONDS: Final = Form(f"a number of milliseconds > 0 and <= {_MAX_INT}", is_milliseconds)
ADDRESS: Final = Form("host:port such as :9400", is_address)
DEVICES: Final = Form(
    "f, g[:ids], i[:ids] or g[:ids]+i[:ids]",
    re.compile(
        r"f|[gi](:\d+(-\d+)?(,\d+(-\d+)?)*)?(\+[gi](:\d+(-\d+)?(,\d+(-\d+)?)*)?)?"
    ).fullmatch,
)
ID_TYPE: Final = Form("uid or device-name", ("uid", "device-name").__contains__)
LOG_FORMAT: Final = Form("text or json", ("text", "json").__contains__)


class Flag(NamedTuple):
    """A flag of dcgm-exporter with its variable."""

    names: str
    """Its name and its short ones, without dashes."""
    variable: str
    """Its variable in the environment."""
    form: Form = TEXT
    """The values that it takes."""
    read: Callable[[str], Meaning] = lambda _: None
    """Returns what a value of that form means here."""


@dataclass(kw_only=True)
class Swap:
    """What a command line and an environment of dcgm-exporter mean."""

    argv: list[str] = field(default_factory=list)
    """The arguments that are not dcgm-exporter's."""
    layer: dict[tuple[str, ...], Given] = field(default_factory=dict)
    """The settings that they stand for."""
    without_effect: list[str] = field(default_factory=list)
    """The flags and variables that have no counterpart."""
    is_asked_for: bool = False
    """Whether anything was given that only dcgm-exporter knows, so that this is a swap."""

    def complete(self, given: Layer) -> Layer:
        """Return the settings of lowest rank, beside those that are `given` as gpuledger's own.

        In place of dcgm-exporter the agent listens where that would, and publishes nothing unless
        brokers are named.
        """
        if not self.is_asked_for:
            return self.layer
        implied: dict[tuple[str, ...], str] = {("http", "listen"): _LISTEN}
        if ("kafka", "bootstrap_servers") not in given:
            implied["no_kafka",] = "true"
        return {
            path: Given(value=text, origin="in place of dcgm-exporter", is_text=True)
            for path, text in implied.items()
        } | self.layer

    def add(self, flag: Flag, value: str, *, origin: str) -> None:
        """Add what a flag's value means; raises `SettingsError` for one that it does not take."""
        if not flag.form.fits(value):
            raise SettingsError(f"{origin}: expected {flag.form.expected}, got {value!r}")
        meaning = flag.read(value)
        if meaning is None:
            self.without_effect.append(origin)
            return
        for name, text in meaning.items():
            path = tuple(name.split("."))
            self.layer[path] = Given(value=text, origin=origin, is_text=True)


def read_swap(argv: Sequence[str], environ: Mapping[str, str]) -> Swap:
    """Read what is dcgm-exporter's of both; a flag wins over a variable.

    Raises `SettingsError` naming the flag or the variable, the value and what is expected.
    """
    known = {flag.variable for flag in FLAGS}
    swap = Swap(
        without_effect=sorted(
            name
            for name in environ
            if name.startswith(_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
        )
    )
    # An empty variable is as good as none, as for dcgm-exporter.
    given = {
        flag: (value, flag.variable) for flag in FLAGS if (value := environ.get(flag.variable))
    }
    # Other programs have variables such as NVIDIA_RESOURCE_NAMES too: they alone are no swap.
    swap.is_asked_for = any(flag.variable.startswith("DCGM_") for flag in given)
    for flag, value, origin in take_flags(argv, swap):
        given[flag] = (value, origin)
        swap.is_asked_for = True
    # In the table's order, whatever the command line's: of two for one setting the later counts.
    for flag in FLAGS:
        if flag in given:
            value, origin = given[flag]
            swap.add(flag, value, origin=origin)
    return swap


def take_flags(argv: Sequence[str], swap: Swap) -> Iterator[tuple[Flag, str, str]]:
    """Yield the flags with values and the arguments' own words; what is no flag is the agent's.

    Written as Go's programs take them: one dash or two, the value behind `=` or as the next word.
    A switch has no next word: one that stands there ends the flags, so later ones have no effect.
    Nor has any word behind `--`.
    """
    words = deque(argv)
    is_over = False
    while words:
        word = words.popleft()
        written, equals, value = word.partition("=")
        if word == "--" and swap.is_asked_for:
            swap.without_effect += words
            return
        flag = _BY_NAME.get(written.lstrip("-")) if word.startswith("-") else None
        if flag is None:
            swap.argv.append(word)
            continue
        is_switch = flag.form is SWITCH
        if is_switch and not equals:
            value = "true"
        elif not equals:
            if not words or not words[0]:
                raise SettingsError(f"{written}: expected a value behind it")
            value = words.popleft()
        if is_over:
            swap.without_effect.append(written)
        else:
            yield flag, value, written
        if is_switch and not equals and words and not words[0].startswith("-"):
            swap.without_effect.append(f"{written} {words.popleft()}")
            is_over = True


def read_counters_file(value: str) -> Meaning:
    """Return the list to show; one of dcgm-exporter's own image is built in where it is missing."""
    if value in _DEFAULT_LISTS and not Path(value).exists():
        return AS_IT_IS
    return None if value == _OLD_LIST else {"exposition.counters_file": value}


def without_counterpart(*idle: str) -> Callable[[str], Meaning]:
    """Return what has no counterpart, save for values that ask for nothing."""
    return lambda value: AS_IT_IS if value in idle else None


def turns(setting: str, on: str) -> Callable[[str], Meaning]:
    """Return what sets `on` where the switch is on."""
    return lambda value: {setting: on} if value in _TRUE else AS_IT_IS


def sets(setting: str) -> Callable[[str], Meaning]:
    """Return a reader that takes the value unchanged."""
    return lambda value: {setting: value}


def sets_seconds(setting: str) -> Callable[[str], Meaning]:
    """Return what takes milliseconds for a setting in seconds."""
    return lambda value: {setting: f"{int(value) / 1e3}"}


# In this order they count; of two that stand for one setting the later one does.
FLAGS: Final = (
    Flag("collectors f", "DCGM_EXPORTER_COLLECTORS", TEXT, read_counters_file),
    Flag("address a", "DCGM_EXPORTER_LISTEN", ADDRESS, sets("http.listen")),
    Flag("collect-interval c", "DCGM_EXPORTER_INTERVAL", MILLISECONDS),
    Flag(
        "kubernetes k",
        "DCGM_EXPORTER_KUBERNETES",
        SWITCH,
        lambda value: {"kubelet.enabled": "auto" if value in _TRUE else "false"},
    ),
    Flag(
        "kubernetes-gpu-id-type",
        "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE",
        ID_TYPE,
        lambda _: AS_IT_IS,
    ),
    Flag(
        "kubernetes-enable-pod-labels",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS",
        SWITCH,
        without_counterpart(*_FALSE),
    ),
    Flag(
        "kubernetes-enable-pod-uid",
        "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID",
        SWITCH,
        turns("exposition.dcgm_pod_uid", "true"),
    ),
    Flag(
        "kubernetes-pod-label-allowlist-regex", "DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX"
    ),
    Flag(
        "kubernetes-virtual-gpus",
        "KUBERNETES_VIRTUAL_GPUS",
        SWITCH,
        turns("exposition.pod_series", "true"),
    ),
    Flag("kubernetes-enable-dra", "KUBERNETES_ENABLE_DRA", SWITCH, lambda _: AS_IT_IS),
    Flag(
        "nvidia-resource-names",
        "NVIDIA_RESOURCE_NAMES",
        TEXT,
        lambda value: {
            "kubelet.resource_names": ",".join((*KubeletSettings().resource_names, value))
        },
    ),
    Flag(
        "pod-resources-kubelet-socket",
        "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        TEXT,
        sets("kubelet.socket"),
    ),
    Flag(
        "use-old-namespace o",
        "DCGM_EXPORTER_USE_OLD_NAMESPACE",
        SWITCH,
        without_counterpart(*_FALSE),
    ),
    Flag("devices d", "DCGM_EXPORTER_DEVICES_STR", DEVICES, without_counterpart("f", "g+i")),
    Flag("switch-devices s", "DCGM_EXPORTER_OTHER_DEVICES_STR", TEXT, without_counterpart("f")),
    Flag("cpu-devices p", "DCGM_EXPORTER_CPU_DEVICES_STR", TEXT, without_counterpart("f")),
    Flag("configmap-data m", "DCGM_EXPORTER_CONFIGMAP_DATA", TEXT, without_counterpart("none")),
    Flag("remote-hostengine-info r", "DCGM_REMOTE_HOSTENGINE_INFO"),
    Flag(
        "no-hostname n", "DCGM_EXPORTER_NO_HOSTNAME", SWITCH, turns("exposition.host_label", "none")
    ),
    Flag("fake-gpus", "DCGM_EXPORTER_USE_FAKE_GPUS", SWITCH, without_counterpart(*_FALSE)),
    Flag("web-config-file", "DCGM_EXPORTER_WEB_CONFIG_FILE", TEXT, sets("http.web_config_file")),
    Flag(
        "web-systemd-socket", "DCGM_EXPORTER_SYSTEMD_SOCKET", SWITCH, without_counterpart(*_FALSE)
    ),
    Flag("web-read-timeout", "DCGM_EXPORTER_WEB_READ_TIMEOUT"),
    Flag("web-write-timeout", "DCGM_EXPORTER_WEB_WRITE_TIMEOUT"),
    Flag(
        "clock-events-count-window-size",
        "DCGM_EXPORTER_CLOCK_EVENTS_COUNT_WINDOW_SIZE",
        MILLISECONDS,
        sets_seconds("exposition.event_window_seconds"),
    ),
    Flag(
        "xid-count-window-size x",
        "DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE",
        MILLISECONDS,
        sets_seconds("exposition.event_window_seconds"),
    ),
    Flag(
        "replace-blanks-in-model-name rbmn",
        "DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",
        SWITCH,
        turns("exposition.dashes_in_model_name", "true"),
    ),
    Flag("debug", "DCGM_EXPORTER_DEBUG", SWITCH, turns("log.level", "debug")),
    Flag("log-format", "DCGM_EXPORTER_LOG_FORMAT", LOG_FORMAT, sets("log.format")),
    Flag("enable-dcgm-log", "DCGM_EXPORTER_ENABLE_DCGM_LOG", SWITCH, without_counterpart(*_FALSE)),
    Flag("dcgm-log-level", "DCGM_EXPORTER_DCGM_LOG_LEVEL", TEXT, without_counterpart("NONE")),
    Flag("config-file", "DCGM_EXPORTER_CONFIG_FILE"),
    Flag("hpc-job-mapping-dir", "DCGM_HPC_JOB_MAPPING_DIR", TEXT, sets("job_mapping_dir")),
    Flag(
        "container-labels", "DCGM_EXPORTER_CONTAINER_LABELS", SWITCH, without_counterpart(*_FALSE)
    ),
    Flag("container-runtime-socket", "DCGM_CONTAINER_RUNTIME_SOCKET"),
    Flag("dump-enabled", "DCGM_EXPORTER_DUMP_ENABLED", SWITCH, without_counterpart(*_FALSE)),
    Flag("dump-directory", "DCGM_EXPORTER_DUMP_DIRECTORY"),
    Flag("dump-retention", "DCGM_EXPORTER_DUMP_RETENTION"),
    Flag(
        "dump-compression", "DCGM_EXPORTER_DUMP_COMPRESSION", SWITCH, without_counterpart(*_FALSE)
    ),
    Flag(
        "disable-startup-validate", "DISABLE_STARTUP_VALIDATE", SWITCH, without_counterpart(*_FALSE)
    ),
    Flag(
        "enable-gpu-bind-unbind-watch",
        "DCGM_EXPORTER_ENABLE_GPU_BIND_UNBIND_WATCH",
        SWITCH,
        lambda _: AS_IT_IS,
    ),
    Flag("gpu-bind-unbind-poll-interval", "DCGM_EXPORTER_GPU_BIND_UNBIND_POLL_INTERVAL"),
    Flag("enable-pprof", "DCGM_EXPORTER_ENABLE_PPROF", SWITCH, without_counterpart(*_FALSE)),
)
_BY_NAME: Final = {name: flag for flag in FLAGS for name in flag.names.split()}

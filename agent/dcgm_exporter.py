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

from agent.settings import KubeletSettings
from gpuledger.errors import SettingsError
from gpuledger.settings.groups import parse_listen
from gpuledger.settings.sources import Given, Layer

_LISTEN: Final = "0.0.0.0:9400"  # where dcgm-exporter listens without a setting
_PREFIX: Final = "DCGM_EXPORTER_"
# Put into each container of a namespace with a Service called dcgm-exporter; nobody's settings.
_SERVICE_LINK: Final = re.compile(r"DCGM_EXPORTER_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
_DEVICES: Final = re.compile(
    r"f|[gi](:\d+(-\d+)?(,\d+(-\d+)?)*)?(\+[gi](:\d+(-\d+)?(,\d+(-\d+)?)*)?)?"
)
_MAX_INT: Final = 2**63 - 1  # a flag of Go's type int takes no more
_MAX_DIGITS: Final = 100  # zeros in front count
_TRUE: Final = ("1", "t", "T", "TRUE", "true", "True")
_FALSE: Final = ("0", "f", "F", "FALSE", "false", "False")
_OWN_LISTS: Final = (
    "/etc/dcgm-exporter/default-counters.csv",
    "/etc/dcgm-exporter/dcp-metrics-included.csv",
)
_OLD_LIST: Final = "/etc/dcgm-exporter/1.x-compatibility-metrics.csv"

Meaning = Mapping[str, str] | None
"""Settings with their values; `None` where this value has no counterpart."""
AS_IT_IS: Final[Mapping[str, str]] = {}
"""The agent does so anyway."""


class Flag(NamedTuple):
    """A flag of dcgm-exporter with its variable."""

    names: tuple[str, ...]
    """Its name and its short ones, without dashes."""
    variable: str
    """Its variable in the environment."""
    read: Callable[[str], Meaning]
    """Returns what a value means here; raises `ValueError` saying what was expected."""
    is_switch: bool = False
    """Whether it takes no value."""


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
        implied: dict[tuple[str, ...], Given] = {("http", "listen"): _of(_LISTEN)}
        if ("kafka", "bootstrap_servers") not in given:
            implied["no_kafka",] = _of("true")
        return implied | self.layer


def read_swap(argv: Sequence[str], environ: Mapping[str, str]) -> Swap:
    """Read what is dcgm-exporter's of both; a flag wins over a variable.

    Raises `SettingsError` naming the flag or the variable, the value and what is expected.
    """
    swap = Swap(without_effect=_unknown_variables(environ))
    # An empty variable is as good as none, as for dcgm-exporter.
    given = {
        flag: (value, flag.variable) for flag in FLAGS if (value := environ.get(flag.variable))
    }
    swap.is_asked_for = any(flag.variable.startswith("DCGM_") for flag in given)
    for flag, value, origin in _take_flags(argv, swap):
        given[flag] = (value, origin)
        swap.is_asked_for = True
    for flag in FLAGS:
        if flag in given:
            value, origin = given[flag]
            _enter(swap, flag, value, origin=origin)
    return swap


def _enter(swap: Swap, flag: Flag, value: str, *, origin: str) -> None:
    try:
        meaning = flag.read(value)
    except ValueError as error:
        raise SettingsError(f"{origin}: expected {error}, got {value!r}") from error
    if meaning is None:
        swap.without_effect.append(origin)
        return
    for name, text in meaning.items():
        path = tuple(name.split("."))
        swap.layer[path] = Given(value=text, origin=origin, is_text=True)


def _take_flags(argv: Sequence[str], swap: Swap) -> Iterator[tuple[Flag, str, str]]:
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
        if not equals:
            value = "true" if flag.is_switch else _next(words, behind=written)
        if is_over:
            swap.without_effect.append(written)
        else:
            yield flag, value, written
        if flag.is_switch and not equals and words and not words[0].startswith("-"):
            swap.without_effect.append(f"{written} {words.popleft()}")
            is_over = True


def _next(words: deque[str], *, behind: str) -> str:
    if not words or not words[0]:
        raise SettingsError(f"{behind}: expected a value behind it")
    return words.popleft()


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = {flag.variable for flag in FLAGS}
    return sorted(
        name
        for name in environ
        if name.startswith(_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
    )


def _of(text: str) -> Given:
    return Given(value=text, origin="in place of dcgm-exporter", is_text=True)


def _bool(value: str) -> bool:
    if value not in (*_TRUE, *_FALSE):
        raise ValueError("true or false")
    return value in _TRUE


def _milliseconds(value: str) -> float:
    is_number = value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS
    if not is_number or not 0 < int(value) <= _MAX_INT:
        raise ValueError(f"a number of milliseconds > 0 and <= {_MAX_INT}")
    return int(value) / 1e3


def _sets(setting: str) -> Callable[[str], Meaning]:
    """Return what takes the value as it stands."""
    return lambda value: {setting: value}


def _turns(setting: str, on: str) -> Callable[[str], Meaning]:
    """Return what sets `on` where the flag is true."""
    return lambda value: {setting: on} if _bool(value) else AS_IT_IS


def _is_always_so(value: str) -> Meaning:
    _bool(value)
    return AS_IT_IS


def _no_switch(value: str) -> Meaning:
    return None if _bool(value) else AS_IT_IS


def _nothing(_: str) -> Meaning:
    return None


def _nothing_but(*idle: str) -> Callable[[str], Meaning]:
    """Return what has no counterpart, save for values that ask for nothing."""
    return lambda value: AS_IT_IS if value in idle else None


def _listen(value: str) -> Meaning:
    try:
        parse_listen(value)
    except ValueError as error:
        raise ValueError("host:port such as :9400") from error
    return {"http.listen": value}


def _counters(value: str) -> Meaning:
    """Take the lists of dcgm-exporter's own image for the built-in one where they are not there."""
    if value in _OWN_LISTS and not Path(value).exists():
        return AS_IT_IS
    return None if value == _OLD_LIST else {"exposition.counters_file": value}


def _interval(value: str) -> Meaning:
    _milliseconds(value)
    return None


def _window(value: str) -> Meaning:
    return {"exposition.event_window_seconds": f"{_milliseconds(value)}"}


def _kubernetes(value: str) -> Meaning:
    return {"kubelet.enabled": "auto" if _bool(value) else "false"}


def _id_type(value: str) -> Meaning:
    if value not in ("uid", "device-name"):
        raise ValueError("uid or device-name")
    return AS_IT_IS


def _resources(value: str) -> Meaning:
    return {"kubelet.resource_names": ",".join((*KubeletSettings().resource_names, value))}


def _devices(value: str) -> Meaning:
    if not _DEVICES.fullmatch(value):
        raise ValueError("f, g[:ids], i[:ids] or g[:ids]+i[:ids]")
    return AS_IT_IS if value in ("f", "g+i") else None


def _log_format(value: str) -> Meaning:
    if value not in ("text", "json"):
        raise ValueError("text or json")
    return {"log.format": value}


def _switch(names: str, variable: str, read: Callable[[str], Meaning] = _no_switch) -> Flag:
    return Flag(tuple(names.split()), variable, read, is_switch=True)


def _value(names: str, variable: str, read: Callable[[str], Meaning] = _nothing) -> Flag:
    return Flag(tuple(names.split()), variable, read)


# In this order they are entered; of two that stand for one setting the later one counts.
FLAGS: Final = (
    _value("collectors f", "DCGM_EXPORTER_COLLECTORS", _counters),
    _value("address a", "DCGM_EXPORTER_LISTEN", _listen),
    _value("collect-interval c", "DCGM_EXPORTER_INTERVAL", _interval),
    _switch("kubernetes k", "DCGM_EXPORTER_KUBERNETES", _kubernetes),
    _value("kubernetes-gpu-id-type", "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE", _id_type),
    _switch("kubernetes-enable-pod-labels", "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS"),
    _switch("kubernetes-enable-pod-uid", "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID"),
    _value(
        "kubernetes-pod-label-allowlist-regex",
        "DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX",
    ),
    _switch(
        "kubernetes-virtual-gpus",
        "KUBERNETES_VIRTUAL_GPUS",
        _turns("exposition.pod_series", "true"),
    ),
    _switch("kubernetes-enable-dra", "KUBERNETES_ENABLE_DRA", _is_always_so),
    _value("nvidia-resource-names", "NVIDIA_RESOURCE_NAMES", _resources),
    _value(
        "pod-resources-kubelet-socket",
        "DCGM_POD_RESOURCES_KUBELET_SOCKET",
        _sets("kubelet.socket"),
    ),
    _switch("use-old-namespace o", "DCGM_EXPORTER_USE_OLD_NAMESPACE"),
    _value("devices d", "DCGM_EXPORTER_DEVICES_STR", _devices),
    _value("switch-devices s", "DCGM_EXPORTER_OTHER_DEVICES_STR", _nothing_but("f")),
    _value("cpu-devices p", "DCGM_EXPORTER_CPU_DEVICES_STR", _nothing_but("f")),
    _value("configmap-data m", "DCGM_EXPORTER_CONFIGMAP_DATA", _nothing_but("none")),
    _value("remote-hostengine-info r", "DCGM_REMOTE_HOSTENGINE_INFO"),
    _switch("no-hostname n", "DCGM_EXPORTER_NO_HOSTNAME", _turns("exposition.host_label", "none")),
    _switch("fake-gpus", "DCGM_EXPORTER_USE_FAKE_GPUS"),
    _value("web-config-file", "DCGM_EXPORTER_WEB_CONFIG_FILE", _sets("http.web_config_file")),
    _switch("web-systemd-socket", "DCGM_EXPORTER_SYSTEMD_SOCKET"),
    _value("web-read-timeout", "DCGM_EXPORTER_WEB_READ_TIMEOUT"),
    _value("web-write-timeout", "DCGM_EXPORTER_WEB_WRITE_TIMEOUT"),
    _value(
        "clock-events-count-window-size",
        "DCGM_EXPORTER_CLOCK_EVENTS_COUNT_WINDOW_SIZE",
        _window,
    ),
    _value("xid-count-window-size x", "DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE", _window),
    _switch(
        "replace-blanks-in-model-name rbmn",
        "DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",
        _turns("exposition.dashes_in_model_name", "true"),
    ),
    _switch("debug", "DCGM_EXPORTER_DEBUG", _turns("log.level", "debug")),
    _value("log-format", "DCGM_EXPORTER_LOG_FORMAT", _log_format),
    _switch("enable-dcgm-log", "DCGM_EXPORTER_ENABLE_DCGM_LOG"),
    _value("dcgm-log-level", "DCGM_EXPORTER_DCGM_LOG_LEVEL", _nothing_but("NONE")),
    _value("config-file", "DCGM_EXPORTER_CONFIG_FILE"),
    _value("hpc-job-mapping-dir", "DCGM_HPC_JOB_MAPPING_DIR"),
    _switch("container-labels", "DCGM_EXPORTER_CONTAINER_LABELS"),
    _value("container-runtime-socket", "DCGM_CONTAINER_RUNTIME_SOCKET"),
    _switch("dump-enabled", "DCGM_EXPORTER_DUMP_ENABLED"),
    _value("dump-directory", "DCGM_EXPORTER_DUMP_DIRECTORY"),
    _value("dump-retention", "DCGM_EXPORTER_DUMP_RETENTION"),
    _switch("dump-compression", "DCGM_EXPORTER_DUMP_COMPRESSION"),
    _switch("disable-startup-validate", "DISABLE_STARTUP_VALIDATE"),
    _switch(
        "enable-gpu-bind-unbind-watch",
        "DCGM_EXPORTER_ENABLE_GPU_BIND_UNBIND_WATCH",
        _is_always_so,
    ),
    _value("gpu-bind-unbind-poll-interval", "DCGM_EXPORTER_GPU_BIND_UNBIND_POLL_INTERVAL"),
    _switch("enable-pprof", "DCGM_EXPORTER_ENABLE_PPROF"),
)
_BY_NAME: Final = {name: flag for flag in FLAGS for name in flag.names}

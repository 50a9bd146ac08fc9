"""The known differences between the agent's page and dcgm-exporter's, with their reasons.

This table is the only source: `gpuledger compare` reads the reasons from it, and `make docs`
writes it into docs/reference/dcgm-exporter.md. The flags have their own table in `dcgm_exporter`.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

Kind = Literal["missing", "label", "value"]
Fact = Literal["absent", "fewer", "changed", "followed"]
"""A condition of a reason, which the comparison found. `absent`: one page has no label, or
the agent's value is 0. `fewer`: the agent's values are lower. `changed`: the values of one page
differ at least as much as the pages do. `followed`: also, the agent's values changed, or those of
dcgm-exporter ended at the agent's."""


class KnownDifference(NamedTuple):
    """A reason why something on the two pages differs."""

    kind: Kind
    """`missing`: only dcgm-exporter has the metric. `label`: a label differs, or only one page has
    it. `value`: the values of a series differ."""
    names: tuple[str, ...]
    """Names of metrics or, for the kind `label`, of labels; `*` matches any characters."""
    reason: str
    """The reason, and the setting that removes the difference, if there is one."""
    needs: Fact | None = None
    """The condition without which the reason does not apply."""


KNOWN: Final = (
    KnownDifference(
        "missing",
        ("DCGM_FI_DEV_CPU_*", "DCGM_FI_DEV_NVSWITCH_*"),
        "The agent has no metrics of CPUs and NVSwitches.",
    ),
    KnownDifference(
        "missing",
        ("DCGM_FI_PROF_*",),
        "The agent has profiling metrics only on Hopper and newer GPUs.",
    ),
    KnownDifference(
        "label",
        ("hostname", "Hostname"),
        "`exposition.host_label` selects the name of the label, or leaves it out.",
        needs="absent",
    ),
    KnownDifference(
        "label", ("UUID", "uuid"), "`exposition.dcgm_old_labels` selects the name.", needs="absent"
    ),
    KnownDifference(
        "label",
        ("pod", "namespace", "container", "pod_name", "pod_namespace", "container_name"),
        "The agent labels a device with its pod only if exactly one container has the device; for"
        " shared devices, set `exposition.pod_series`.",
        needs="absent",
    ),
    KnownDifference(
        "label", ("pod_uid",), "`exposition.dcgm_pod_uid` adds the label.", needs="absent"
    ),
    KnownDifference(
        "label",
        ("vgpu",),
        "dcgm-exporter copies the series of a shared device to each pod; the agent does not.",
        needs="absent",
    ),
    KnownDifference(
        "label", ("dra_*",), "The agent has no labels of resource claims.", needs="absent"
    ),
    KnownDifference(
        "label",
        ("hpc_job",),
        "The agent shows a job only if exactly one job has the device.",
        needs="absent",
    ),
    KnownDifference(
        "label",
        ("modelName",),
        "`exposition.dashes_in_model_name` replaces blanks by dashes.",
    ),
    KnownDifference(
        "label",
        ("GPU_C_ID",),
        "The agent distinguishes several compute instances of one GPU instance.",
        needs="absent",
    ),
    KnownDifference(
        "label",
        ("DCGM_FI_*",),
        "The lists of metrics have different fields of type `label`.",
        needs="absent",
    ),
    KnownDifference("label", ("err_msg",), "The agent has its own descriptions of XIDs."),
    KnownDifference("label", ("err_code",), "The agent reports only XIDs since its own start."),
    KnownDifference(
        "label",
        ("health_error_code",),
        "The agent derives the health of a GPU from its own readings.",
    ),
    KnownDifference(
        "label",
        ("window_size_in_ms",),
        "`exposition.event_window_seconds` sets the one window of the agent.",
    ),
    KnownDifference(
        "value",
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEM_COPY_UTIL"),
        "The agent shows the mean of its sampling interval, with decimals. dcgm-exporter shows the"
        " driver's last value.",
        needs="changed",
    ),
    KnownDifference(
        "value",
        ("DCGM_FI_PROF_*", "DCGM_FI_DEV_NVLINK_BANDWIDTH_*"),
        "Both values are means, but over different times.",
        needs="changed",
    ),
    KnownDifference(
        "value",
        ("DCGM_FI_DEV_XID_ERRORS",),
        "The agent reports only XIDs since its own start.",
        needs="absent",
    ),
    KnownDifference(
        "value",
        ("DCGM_EXP_XID_ERRORS_COUNT", "DCGM_EXP_CLOCK_EVENTS_COUNT"),
        "The agent reports only events since its own start.",
        needs="fewer",
    ),
    KnownDifference(
        "value",
        ("DCGM_EXP_GPU_HEALTH_STATUS",),
        "The agent derives the health of a GPU from its own readings.",
    ),
    KnownDifference(
        "value",
        ("*",),
        "The value changes, and dcgm-exporter repeats a value until its next collection, by default"
        " for 30 s.",
        needs="followed",
    ),
    KnownDifference(
        "label",
        ("*",),
        "The label changes, and dcgm-exporter repeats a page until its next collection, by default"
        " for 30 s.",
        needs="followed",
    ),
)


def find_reason(kind: Kind, name: str, facts: Collection[Fact] = ()) -> str:
    """Return the reason of a difference; empty if no reason is known.

    `name` is a metric, by its name before DCGM 4.6, or a label.
    """
    for known in KNOWN:
        applies = known.kind == kind and (known.needs is None or known.needs in facts)
        if applies and any(fnmatchcase(name, pattern) for pattern in known.names):
            return known.reason
    return ""

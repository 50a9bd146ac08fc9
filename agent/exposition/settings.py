"""The settings of the node's page. Loading them is `gpuledger.settings`' business."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

Profile = Literal["lean", "full"]


class ExpositionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the node shows of its GPUs on `/metrics`."""

    dcgm_names: Literal["old", "new", "both", "none"] = "old"
    """Which of DCGM's names to show: those that dcgm-exporter has always had, those of DCGM 4.6,
    both together, or none."""
    native_metrics: bool = True
    """Whether to show `gpuledger_…` metrics of GPUs and containers, in base units."""
    profile: Profile = "lean"
    """How many of them: `lean` shows what each GPU does, what is wrong with it and who is on it,
    `full` every reading. DCGM's metrics are chosen by `counters_file` instead."""
    counters_file: Path | None = None
    """DCGM's fields to show, a list in dcgm-exporter's format; absent means its default list."""
    host_label: Literal["hostname", "Hostname", "none"] = "hostname"
    """The label of DCGM's metrics that names the node; dcgm-exporter's has been `hostname` since
    May 2026, and `Hostname` before."""
    pod_series: bool = False
    """Whether a GPU that no one container has to itself gets a series of `DCGM_FI_DEV_GPU_UTIL`,
    `…_FB_USED` and `DCGM_FI_PROF_GR_ENGINE_ACTIVE` for each container on it, beside its own: a sum
    over one of these families then counts the GPU twice, unless it takes `gpuledger_share=""`."""
    dashes_in_model_name: bool = False
    """Whether DCGM's metrics have dashes in place of the blanks in `modelName`."""
    process_series: bool = False
    """Whether to show single processes: `nvidia_pid_pod` and `gpuledger_process_…`."""
    max_process_series: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 256
    """The most processes shown, those that hold most memory first; the others are counted."""
    stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    """For how long a GPU that does not answer any more is still shown, and no less than 3 ticks."""
    slow_stale_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    """For how long health and limits, which are asked every few seconds, are still shown."""
    event_window_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e16)] = 300.0
    """Length of the window of `DCGM_EXP_XID_ERRORS_COUNT` and `DCGM_EXP_CLOCK_EVENTS_COUNT`; as
    long as dcgm-exporter's may be. At most the last 1000 events of a GPU are counted."""

"""Renders the node's GPU metrics in the Prometheus text format.

The settings select the parts of the page. The text is rendered for a scrape and cached until the
state changes or the text is a second old.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FileWatch
from gpuledger_agent.exposition.dcgm import DcgmPage
from gpuledger_agent.exposition.dcgm_fields import default_counters, read_counters
from gpuledger_agent.exposition.native import (
    write_containers,
    write_events,
    write_facts,
    write_native,
    write_processes,
)
from gpuledger_agent.exposition.node_state import NodeState
from gpuledger_agent.settings import ExpositionSettings

_log = structlog.get_logger(__name__)
_KEEP_NS: Final = NS_PER_SECOND


class PageRenderer:
    """Renders the page `/metrics` of one node in the Prometheus text format."""

    def __init__(
        self, node_state: NodeState, *, settings: ExpositionSettings, clock: Clock
    ) -> None:
        """Create a renderer and read the file that lists DCGM counters.

        Raise `UserError` if the file is invalid.
        """
        self._node_state = node_state
        self._settings = settings
        self._clock = clock
        file = settings.counters_file
        # No minimum interval, because the file is only checked when a page is rendered.
        self._watch = FileWatch([file] if file else [], poll_interval_seconds=0)
        self._dcgm = _dcgm(settings)
        self._written = b""
        self._written_of = -1
        self._written_ns = 0

    def __call__(self) -> bytes:
        """Return the page as UTF-8 text; empty before the first tick."""
        now_ns = self._clock.monotonic_ns()
        # Render again even without a new tick, because values may have become too old to be shown.
        is_old = now_ns - self._written_ns > _KEEP_NS
        if self._written_of != self._node_state.version or is_old:
            self._written = self._write()
            self._written_of, self._written_ns = self._node_state.version, now_ns
        return self._written

    def _write(self) -> bytes:
        if self._watch.has_changed():
            try:
                self._dcgm = _dcgm(self._settings)
            except UserError as error:
                # Keep the old list if the new one is invalid.
                _log.error("counters_refused", error=str(error))
            else:
                _log.info("counters_read", file=str(self._settings.counters_file))
        now = self._node_state.snapshot()
        if now is None:
            return b""
        parts: list[Iterator[str]] = [self._dcgm.write(now)] if self._dcgm else []
        if self._settings.native_metrics:
            parts += [
                write_native(now, self._settings.profile),
                write_facts(now, self._settings.profile),
                write_events(now),
                write_containers(now),
            ]
        if self._settings.process_series:
            parts.append(write_processes(now, max_processes=self._settings.max_process_series))
        # Encode line by line, so that there is only one copy of the page in memory.
        text = bytearray()
        for line in chain.from_iterable(parts):
            text += line.encode()
        return bytes(text)


def _dcgm(settings: ExpositionSettings) -> DcgmPage | None:
    if settings.dcgm_names == "none":
        return None
    file = settings.counters_file
    return DcgmPage(
        read_counters(file) if file else default_counters(),
        names=settings.dcgm_names,
        host_label=settings.host_label,
        event_window_seconds=settings.event_window_seconds,
        pod_series=settings.pod_series,
        dashes_in_model_name=settings.dashes_in_model_name,
        shows_pod_uid=settings.dcgm_pod_uid,
        devices=settings.dcgm_devices,
        has_old_labels=settings.dcgm_old_labels,
    )

"""From what a pod's spec and status say of its containers to their records. Pure."""

from collections.abc import Callable, Sequence
from sys import intern
from typing import Final

from enricher.podwatch.objects import (
    ApiContainer,
    ContainerState,
    ContainerStatus,
    PodSpec,
    PodStatus,
    Running,
    Terminated,
)
from gpuledger.records import PodContainer

Nanoseconds = Callable[[str | None], int | None]
_NO_STATE: Final = ContainerState()


def containers_of(spec: PodSpec, status: PodStatus, nanoseconds: Nanoseconds) -> list[PodContainer]:
    """Return the containers of all three kinds: as their status names them, else as asked for."""
    found = [
        *_of_one_kind(spec.init_containers, status.init_container_statuses, nanoseconds),
        *_of_one_kind(spec.containers, status.container_statuses, nanoseconds),
        *_of_one_kind(spec.ephemeral_containers, status.ephemeral_container_statuses, nanoseconds),
    ]
    # A list that grew has room for more; of a hundred thousand pods that is 3 MB for nothing.
    return found.copy()


def last_end_ns(containers: Sequence[PodContainer]) -> int | None:
    """Return when the last of the containers ended; `None` where one that was started has not."""
    last = None
    for one in containers:
        if one.ended_time_ns is not None:
            last = max(last or 0, one.ended_time_ns)
        elif one.container_id:
            return None
    return last


def _of_one_kind(
    asked: Sequence[ApiContainer] | None,
    running: Sequence[ContainerStatus] | None,
    nanoseconds: Nanoseconds,
) -> list[PodContainer]:
    if not (asked or running):
        return []
    by_name = {one.name: one for one in running or ()}
    names = dict.fromkeys(one.name for one in asked or ()) | dict.fromkeys(by_name)
    return [_container(name, by_name.get(name), nanoseconds) for name in names]


def _container(name: str, status: ContainerStatus | None, nanoseconds: Nanoseconds) -> PodContainer:
    if status is None:
        return PodContainer(name=intern(name), restarts=0)
    container_id = _without_scheme(status.container_id)
    last = (status.last_state or _NO_STATE).terminated
    last_id = _without_scheme(last.container_id) if last else None
    life = _life(status.state or _NO_STATE, last if last_id == container_id else None)
    return PodContainer(
        name=intern(name),
        container_id=container_id,
        restarts=status.restart_count,
        started_time_ns=nanoseconds(life.started_at) if life else None,
        ended_time_ns=nanoseconds(life.finished_at) if isinstance(life, Terminated) else None,
        previous_container_id=None if last_id == container_id else last_id,
    )


def _life(state: ContainerState, last: Terminated | None) -> Running | Terminated | None:
    """Return the life of the container that the status names.

    One that waits for its restart is named by the id of its last life, and only `lastState` tells
    of that.
    """
    return state.running or state.terminated or last


def _without_scheme(container_id: str | None) -> str | None:
    """Return the id alone: `containerd://4f…` becomes `4f…`; none where nothing was started."""
    return container_id.rpartition("://")[2] or None if container_id else None

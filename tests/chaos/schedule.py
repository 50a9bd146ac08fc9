"""A plan of actions, with targets and times, drawn from a seed. Runs nothing itself."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CALM_SECONDS: Final = 5.0
"""Time without new actions at the start and at the end."""
PAUSE_SECONDS: Final = (3.0, 6.0)
"""Time between the starts of two actions."""
PODWATCH: Final = "podwatch"
BROKER: Final = "broker"
API_SERVER: Final = "API server"


class Kind(StrEnum):
    """The kinds of actions, as progress lines name them."""

    KILL_WORKER = "kill -9 worker"
    KILL_MIDWAY = "kill -9 worker behind a stopped broker"
    STOP_WORKER = "SIGSTOP worker"
    KILL_PODWATCH = "kill -9 podwatch"
    STOP_PODWATCH = "SIGSTOP podwatch"
    RESTART_BROKER = "restart broker"
    TAKE_API_SERVER = "take API server away"


_TARGETS: Final = {
    Kind.KILL_PODWATCH: PODWATCH,
    Kind.STOP_PODWATCH: PODWATCH,
    Kind.RESTART_BROKER: BROKER,
    Kind.TAKE_API_SERVER: API_SERVER,
}
_AWAY_SECONDS: Final = {
    Kind.KILL_WORKER: (0.5, 4.0),
    Kind.KILL_MIDWAY: (0.5, 4.0),
    Kind.KILL_PODWATCH: (0.5, 4.0),
    Kind.RESTART_BROKER: (0.5, 5.0),
    Kind.TAKE_API_SERVER: (4.0, 15.0),
}
_BEYOND_SESSION_SECONDS: Final = (2.0, 6.0)
# A worker without partitions has nothing to lose; it is still hit now and then.
_SETTLED_SECONDS: Final = 10.0
_HIT_UNSETTLED_RATIO: Final = 0.2
_BAG: Final = (*Kind, Kind.KILL_MIDWAY, Kind.STOP_WORKER)


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action on one component, which is then brought back."""

    at_seconds: float
    """Since the start of the run."""
    kind: Kind
    target: str
    """Name of the component."""
    away_seconds: float
    """How long the component is away, without the time of its own start."""

    @override
    def __str__(self) -> str:
        """Return the text of a progress line."""
        named = self.kind.replace("worker", self.target)
        return f"{named} for {self.away_seconds:.1f} s"


WORKER_KINDS: Final = frozenset({Kind.KILL_WORKER, Kind.KILL_MIDWAY, Kind.STOP_WORKER})
_KILLS: Final = frozenset({Kind.KILL_WORKER, Kind.KILL_MIDWAY, Kind.KILL_PODWATCH})


def killed_more_than(times: int, actions: Iterable[Action]) -> set[str]:
    """Return the components that the actions kill more than `times` times."""
    kills = Counter(action.target for action in actions if action.kind in _KILLS)
    return {target for target, count in kills.items() if count > times}


def plan_actions(
    *, seed: int, seconds: float, workers: Sequence[str], session_timeout_seconds: float
) -> list[Action]:
    """Plan a run: equally many actions of each kind, more on workers; one worker is always left."""
    planner = _Planner(seed=seed, workers=workers, session_timeout_seconds=session_timeout_seconds)
    return planner.plan(seconds=seconds)


class _Planner:
    def __init__(
        self, *, seed: int, workers: Sequence[str], session_timeout_seconds: float
    ) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - a plan that can be repeated
        self._workers = workers
        self._session_seconds = session_timeout_seconds
        self._back_at_seconds: dict[str, float] = {}
        self._bag: list[Kind] = []

    def plan(self, *, seconds: float) -> list[Action]:
        actions: list[Action] = []
        at_seconds = CALM_SECONDS
        while at_seconds < seconds - CALM_SECONDS:
            actions.append(self._next(at_seconds))
            at_seconds = actions[-1].at_seconds + self._chance.uniform(*PAUSE_SECONDS)
        return actions

    def _next(self, at_seconds: float) -> Action:
        kind = self._draw()
        away_seconds = self._away_seconds(kind)
        target = _TARGETS[kind] if kind in _TARGETS else self._worker(at_seconds)
        at_seconds = max(at_seconds, self._free_at_seconds(kind, target))
        self._back_at_seconds[target] = at_seconds + away_seconds
        return Action(at_seconds=at_seconds, kind=kind, target=target, away_seconds=away_seconds)

    def _draw(self) -> Kind:
        if not self._bag:
            self._bag = list(_BAG)
            self._chance.shuffle(self._bag)
        return self._bag.pop()

    def _away_seconds(self, kind: Kind) -> float:
        if kind in _AWAY_SECONDS:
            return self._chance.uniform(*_AWAY_SECONDS[kind])
        return self._session_seconds + self._chance.uniform(*_BEYOND_SESSION_SECONDS)

    def _worker(self, at_seconds: float) -> str:
        """Draw a worker, usually one that had time to get partitions."""
        back = self._back_at_seconds
        settled = [
            name
            for name in self._workers
            if back.get(name, -_SETTLED_SECONDS) + _SETTLED_SECONDS <= at_seconds
        ]
        if self._chance.random() < _HIT_UNSETTLED_RATIO:
            return self._chance.choice(self._workers)
        if settled:
            return self._chance.choice(settled)
        return min(self._workers, key=lambda name: back.get(name, 0.0))

    def _free_at_seconds(self, kind: Kind, target: str) -> float:
        """Return when the target is back; for a worker, when another worker is back as well."""
        back = self._back_at_seconds
        if kind not in WORKER_KINDS:
            return back.get(target, 0.0)
        others = sorted(back.get(name, 0.0) for name in self._workers if name != target)
        return max(back.get(target, 0.0), *others[:1])

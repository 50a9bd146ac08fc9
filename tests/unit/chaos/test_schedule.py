"""Guarantees of every plan of a chaos run, whatever its seed."""

from collections import Counter
from itertools import pairwise

from tests.chaos.schedule import (
    CALM_SECONDS,
    WORKER_KINDS,
    Action,
    Kind,
    killed_more_than,
    plan_actions,
)
from tests.tables import for_each

WORKERS = ["join-0", "join-1", "join-2"]
SESSION_SECONDS = 6.0
seeds = for_each("seed", range(20))


def plan(seed: int, *, seconds: float = 300.0, workers: list[str] = WORKERS) -> list[Action]:
    """Plan five minutes."""
    return plan_actions(
        seed=seed, seconds=seconds, workers=workers, session_timeout_seconds=SESSION_SECONDS
    )


def test_the_same_seed_gives_the_same_plan_and_another_seed_another_plan() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


@seeds
def test_every_component_gets_its_share_and_workers_get_more(seed: int) -> None:
    counts = Counter(action.kind for action in plan(seed))
    others = [counts[kind] for kind in set(Kind) - WORKER_KINDS]
    assert min(others) >= 4
    assert max(others) - min(others) <= 1
    assert min(counts[Kind.STOP_WORKER], counts[Kind.KILL_MIDWAY]) > max(others)


@seeds
def test_a_minute_is_enough_for_every_kind(seed: int) -> None:
    assert {action.kind for action in plan(seed, seconds=60.0)} == set(Kind)


@seeds
def test_a_stopped_component_stays_silent_for_longer_than_its_session(seed: int) -> None:
    stopped = [action for action in plan(seed) if action.kind is Kind.STOP_WORKER]
    assert all(action.away_seconds > SESSION_SECONDS for action in stopped)


@seeds
def test_nothing_is_done_to_a_component_that_is_down(seed: int) -> None:
    actions = plan(seed)
    for target in {action.target for action in actions}:
        own = [action for action in actions if action.target == target]
        for one, next_one in pairwise(own):
            assert one.at_seconds + one.away_seconds <= next_one.at_seconds


@seeds
@for_each("workers", [WORKERS[:2], WORKERS])
def test_one_worker_is_always_running(seed: int, workers: list[str]) -> None:
    taken = [each for each in plan(seed, workers=workers) if each.kind in WORKER_KINDS]
    for action in taken:
        away = {
            other.target
            for other in taken
            if other.at_seconds <= action.at_seconds < other.at_seconds + other.away_seconds
        }
        assert len(away) < len(workers)


@seeds
def test_actions_begin_in_their_order_after_a_calm_start(seed: int) -> None:
    begins = [action.at_seconds for action in plan(seed)]
    assert begins[0] >= CALM_SECONDS
    assert begins == sorted(begins)


def test_a_progress_line_names_action_component_and_time() -> None:
    requested = {"at_seconds": 1.0, "away_seconds": 2.0}
    one = Action(kind=Kind.KILL_MIDWAY, target="join-1", **requested)
    other = Action(kind=Kind.RESTART_BROKER, target="broker", **requested)
    assert str(one) == "kill -9 join-1 behind a stopped broker for 2.0 s"
    assert str(other) == "restart broker for 2.0 s"


def test_components_that_are_stopped_are_not_counted_as_killed() -> None:
    def action(kind: Kind, target: str) -> Action:
        return Action(at_seconds=0.0, kind=kind, target=target, away_seconds=1.0)

    actions = [
        *[action(Kind.KILL_WORKER, "join-0")] * 2,
        *[action(Kind.KILL_MIDWAY, "join-0")] * 2,
        *[action(Kind.KILL_WORKER, "join-1")] * 3,
        *[action(Kind.STOP_WORKER, "join-1")] * 4,
    ]
    assert killed_more_than(3, actions) == {"join-0"}

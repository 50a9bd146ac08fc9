"""The process ends if nothing works any more, and never because one GPU is faulty."""

import threading

import pytest

from gpuledger_agent.gpu.watchdog import LoopWatch, NothingWorksError, Watchdog
from tests.errors import has_words
from tests.hanging import HANG_SECONDS


class PlayedDriver:
    idle_seconds = 0.0
    detail = "nvmlInit: Driver Not Loaded"
    known = ("GPU-0", "GPU-1")


@pytest.fixture
def reported() -> list[tuple[str, str, str]]:
    return []


def watchdog(driver: PlayedDriver, reported: list[tuple[str, str, str]]) -> Watchdog:
    return Watchdog(driver, seconds=300, report=lambda *incident: reported.append(incident))


def test_the_process_continues_if_the_driver_works_from_time_to_time(
    reported: list[tuple[str, str, str]],
) -> None:
    driver = PlayedDriver()
    for driver.idle_seconds in (0, 100, 299, 1):
        watchdog(driver, reported).check()
    assert not reported


async def test_the_exit_is_reported_for_each_gpu_with_its_reason_before_it_happens(
    reported: list[tuple[str, str, str]],
) -> None:
    driver = PlayedDriver()
    driver.idle_seconds = 301.0
    with pytest.raises(NothingWorksError):
        await watchdog(driver, reported).run()
    reason = "no GPU answered for 301 s: nvmlInit: Driver Not Loaded"
    assert reported == [("agent_ended", "GPU-0", reason), ("agent_ended", "GPU-1", reason)]


def test_a_process_that_was_paused_gets_its_full_time_again(
    reported: list[tuple[str, str, str]],
) -> None:
    driver = PlayedDriver()
    now_seconds = 1000.0
    dog = Watchdog(
        driver,
        seconds=300,
        report=lambda *incident: reported.append(incident),
        now_seconds=lambda: now_seconds,
    )
    dog.check()
    now_seconds += 3600
    driver.idle_seconds = 3600
    dog.check()
    for _ in range(59):
        now_seconds, driver.idle_seconds = now_seconds + 5, driver.idle_seconds + 5
        dog.check()
    assert not reported
    now_seconds += 5
    with pytest.raises(NothingWorksError, check=has_words("300 s")):
        dog.check()


def test_the_process_continues_if_the_loop_beats_between_checks() -> None:
    watch = LoopWatch(max_missed=2, end_process=lambda: None, seconds=1)
    for _ in range(10):
        assert not watch.check()
        assert not watch.check()
        watch.beat()


def test_the_watch_thread_ends_the_process_if_the_loop_stops() -> None:
    ended = threading.Event()
    watch = LoopWatch(max_missed=2, end_process=ended.set, seconds=0.02)
    watch.begin()
    assert ended.wait(HANG_SECONDS)


def test_a_watch_that_was_stopped_does_not_end_the_process() -> None:
    ended = threading.Event()
    watch = LoopWatch(max_missed=2, end_process=ended.set, seconds=0.001)
    watch.end()
    watch.run()
    assert not ended.is_set()

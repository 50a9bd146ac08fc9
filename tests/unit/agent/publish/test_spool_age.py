"""The age of bundles on the disk: by the time since boot, whatever the wall clock shows."""

from pathlib import Path

import pytest

from gpuledger_agent.metrics import (
    SPOOL_OLDEST_SECONDS,
)
from tests.metric_values import value_of
from tests.unit.agent.publish.builders import (
    EARLIER_BOOT,
    NOW_SECONDS,
    Uptime,
    bundle_of,
    drain,
    dropped,
    fill,
    number_of,
    reopened,
    spool_in,
)


def test_the_oldest_waiting_bundle_is_the_oldest_of_the_oldest_frame(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    spool.append([bundle_of(number) for number in (3, 4, 5)])
    spool.append([bundle_of(6)])
    assert value_of(SPOOL_OLDEST_SECONDS) == NOW_SECONDS + 3
    reopened(spool, tmp_path)
    assert value_of(SPOOL_OLDEST_SECONDS) == NOW_SECONDS + 3


def test_bundles_that_are_too_old_are_dropped_and_counted(tmp_path: Path) -> None:
    before, clock = dropped("age"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_age_seconds=10)
    for number, second in enumerate((1000, 1009, 1010, 1019)):
        clock.seconds = second
        fill(spool, number)
    clock.seconds = 1020
    assert drain(spool) == [2, 3]
    assert dropped("age") - before == 2


@pytest.mark.parametrize("leap_seconds", [240, 3600, 365 * 86_400, -3600, -NOW_SECONDS])
def test_ticks_age_by_the_time_since_boot_whatever_their_stamps(
    tmp_path: Path, leap_seconds: int
) -> None:
    before, clock = dropped("age"), Uptime(1000)
    spool = spool_in(tmp_path, up_seconds=clock, max_age_seconds=3600)
    for second in range(200):
        clock.seconds = 1000 + second
        leapt = leap_seconds if 195 <= second < 200 else 0
        fill(spool, second + leapt)
    found = drain(spool)
    assert [one for one in found if 0 <= one < 195] == list(range(195))
    assert len(found) == 200
    assert dropped("age") == before


def test_the_next_process_of_a_boot_continues_the_age(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, up_seconds=1000)
    fill(spool, 1)
    spool.close()
    spool = spool_in(tmp_path, up_seconds=1900)
    fill(spool, 2)
    assert drain(reopened(spool, tmp_path, up_seconds=1905, max_age_seconds=900)) == [2]


def test_bundles_of_an_earlier_boot_are_as_old_as_the_current_boot(
    tmp_path: Path,
) -> None:
    before, clock = dropped("age"), Uptime(0)
    spool = spool_in(tmp_path, boot_id=EARLIER_BOOT, up_seconds=86_400)
    fill(spool, 1)
    # At whatever time that was, and whatever the clock shows after the reboot.
    again = reopened(spool, tmp_path, up_seconds=clock, max_age_seconds=60)
    clock.seconds = 60
    found = again.read(max_bundles=9)
    assert found is not None
    assert list(map(number_of, found[0])) == [1]
    clock.seconds = 61
    assert again.read(max_bundles=9) is None
    assert dropped("age") - before == 1


def test_bundles_that_are_too_old_are_dropped_even_if_nothing_reads_them(tmp_path: Path) -> None:
    up = Uptime(0)
    spool = spool_in(tmp_path, up_seconds=up, max_age_seconds=3600)
    fill(spool, 1)
    up.seconds = 3601
    fill(spool, 2)

    assert spool.bundles == 1
    assert drain(spool) == [2]

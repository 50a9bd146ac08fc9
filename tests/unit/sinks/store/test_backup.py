"""A store that is restored from a backup continues where it ends (docs/guides/backup.md)."""

import shutil
from pathlib import Path

from tests.unit.sinks.builders import bus, event, eventually, publish, running
from tests.unit.sinks.store.storing import is_committed, query, store

COUNT = "select count(distinct seq), count(*) from {entries}"


async def test_a_restored_store_reads_the_events_since_the_backup_again_and_counts_each_once(
    tmp_path: Path,
) -> None:
    on, live = bus(), tmp_path / "store"
    await publish(on, *map(event, range(3)))
    async with running(store(live, on)):
        await eventually(is_committed(on, 3))
    backup = Path(shutil.copytree(live, tmp_path / "backup"))
    await publish(on, *map(event, range(3, 8)))
    async with running(store(live, on)):
        await eventually(is_committed(on, 8))
    whole = query(live, COUNT)

    shutil.rmtree(live)
    shutil.copytree(backup, live)
    assert query(live, COUNT)[0][0] == 3
    await publish(on, event(8))
    async with running(store(live, on)):
        await eventually(is_committed(on, 9))
    assert whole == [(8, 16)]
    assert query(live, COUNT) == [(9, 18)]

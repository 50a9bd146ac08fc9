"""A lost GPU's XIDs, counts and health stay on the page."""

from pathlib import Path

from gpuledger.records import GpuHealth, GpuThrottling
from gpuledger_agent.settings import ExpositionSettings
from tests.unit.agent.exposition.builders import Node, gpu, incident, inventory, node, sample

XID = "DCGM_FI_DEV_XID_ERRORS"
XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"
POWER = "DCGM_FI_DEV_POWER_USAGE"
UP = "gpuledger_node_gpu_up"
HOUR_SECONDS = 3600


def watched(tmp_path: Path) -> Node:
    """Return a page with all series that matter for a lost GPU."""
    file = tmp_path / "counters.csv"
    file.write_text("".join(f"{name}, gauge, x\n" for name in (XID, XIDS, HEALTH, POWER)))
    return node(ExpositionSettings(counters_file=file))


def lose(it: Node, *, with_xid: int | None = 79) -> None:
    """Show two GPUs, then lose the first and show an inventory without it."""
    well = {"health": GpuHealth(remapped_rows_failed=False), "power_milliwatts": 100_000}
    it.show(sample(gpu(0, **well), gpu(1, **well)), inventory=inventory(0, 1))
    if with_xid:
        it.view.record_incident(incident(0, with_xid))
    it.view.record_incident(incident(0, kind="gpu_lost"))
    it.show(sample(gpu(1, **well)), inventory=inventory(1))


def verdicts(it: Node) -> dict[tuple[str, ...], float]:
    return it.values(HEALTH, "gpu", "health_watch", "health_error_code")


def test_the_xid_of_a_lost_gpu_is_still_there_at_the_next_scrape(tmp_path: Path) -> None:
    it = watched(tmp_path)
    lose(it)
    for _ in range(3):
        it.clock.advance(30)
        it.show(sample(gpu(1, power_milliwatts=100_000)))
        assert it.values(XID, "gpu", "UUID") == {("0", "GPU-0"): 79, ("1", "GPU-1"): 0}
        assert it.values(XIDS, "gpu", "xid")["0", "79"] == 1
        assert verdicts(it)["0", "ALL", "DCGM_FR_FALLEN_OFF_BUS"] == 20
        assert it.values(UP, "gpu_index") == {("0",): 0, ("1",): 1}
    it.clock.advance(HOUR_SECONDS)
    it.show(sample(gpu(1)))
    assert it.values(XID, "gpu")["0",] == 79
    assert it.values(XIDS, "gpu", "xid")["0", ""] == 0
    assert verdicts(it)["0", "ALL", "DCGM_FR_FALLEN_OFF_BUS"] == 20


def test_the_readings_of_a_lost_gpu_disappear(tmp_path: Path) -> None:
    it = watched(tmp_path)
    lose(it)
    it.clock.advance(6)
    it.show(sample(gpu(1, power_milliwatts=100_000)))
    assert it.values(POWER, "gpu") == {("1",): 100.0}
    assert {watch for gpu_index, watch, _ in verdicts(it) if gpu_index == "0"} == {"ALL"}


def test_a_gpu_is_failing_from_its_loss_to_its_recovery(tmp_path: Path) -> None:
    it = watched(tmp_path)
    lose(it)
    assert verdicts(it)["0", "ALL", "DCGM_FR_FALLEN_OFF_BUS"] == 20
    it.clock.advance(60)
    it.view.record_incident(incident(0, kind="gpu_recovered"))
    well = gpu(0, health=GpuHealth(remapped_rows_failed=False))
    it.show(sample(well, gpu(1)), inventory=inventory(0, 1))
    assert verdicts(it)["0", "ALL", "DCGM_FR_OK"] == 0
    assert verdicts(it)["0", "MEM", "DCGM_FR_OK"] == 0
    assert it.values(UP, "gpu_index")["0",] == 1
    assert it.values(XID, "gpu")["0",] == 79


def test_a_gpu_lost_by_another_xid_is_reported_with_it(tmp_path: Path) -> None:
    it = watched(tmp_path)
    lose(it, with_xid=119)
    assert verdicts(it)["0", "ALL", "DCGM_FR_XID_ERROR"] == 20


def test_a_gpu_that_was_lost_without_an_xid_is_failing_too(tmp_path: Path) -> None:
    it = watched(tmp_path)
    lose(it, with_xid=None)
    it.clock.advance(60)
    assert verdicts(it)["0", "ALL", "DCGM_FR_FALLEN_OFF_BUS"] == 20
    assert it.values(XID, "gpu")["0",] == 0


def test_a_gpu_that_is_only_unresponsive_keeps_its_xid_and_has_no_verdict(
    tmp_path: Path,
) -> None:
    it = watched(tmp_path)
    it.show(sample(gpu(0), gpu(1)), inventory=inventory(0, 1), incidents=[incident(0, 31)])
    it.clock.advance(60)
    it.show(sample(gpu(1)))
    assert it.values(XID, "gpu")["0",] == 31
    assert it.values(UP, "gpu_index") == {("0",): 0, ("1",): 1}
    assert not verdicts(it)


def test_a_gpu_that_was_removed_from_the_node_is_forgotten(tmp_path: Path) -> None:
    it = watched(tmp_path)
    it.show(sample(gpu(0), gpu(1)), inventory=inventory(0, 1))
    it.clock.advance(60)
    it.show(sample(gpu(1)), inventory=inventory(1))
    assert it.values(XID, "gpu").keys() == {("1",)}


def test_the_overall_verdict_is_the_worst_one(tmp_path: Path) -> None:
    it = watched(tmp_path)
    it.show(
        sample(
            gpu(
                health=GpuHealth(remapped_rows_failed=False, remapped_rows_pending=True),
                throttling=GpuThrottling(reasons=0),
            )
        )
    )
    assert verdicts(it)["0", "ALL", "DCGM_FR_PENDING_ROW_REMAP"] == 10

"""A cache stays within its budget, and entries that are in use stay in it."""

from gpuledger.recent import FORGOTTEN_AFTER_NS, Budget, Recent

KEEP = 100


def sized(budget: Budget) -> Recent[str, list[int]]:
    """Return a mapping of values whose first item is their size in bytes."""
    return Recent(budget=budget, size_bytes=lambda value: value[0])


def test_values_that_come_once_are_evicted_and_those_in_use_stay() -> None:
    budget = Budget(max_bytes=1_000)
    recent = sized(budget)
    recent["node"] = [10]

    for number in range(1_000):
        recent[f"made-up-{number}"] = [100]
        assert recent.get("node") == [10]
        assert budget.held_bytes <= budget.max_bytes
        assert budget.held_bytes == sum(value[0] for value in recent.values())

    assert recent.forgotten > KEEP


def test_mappings_share_a_budget_and_release_it() -> None:
    budget = Budget(max_bytes=1_000)
    one, other = sized(budget), sized(budget)
    one["a"], other["b"] = [400], [400]
    assert budget.held_bytes == 800

    one.clear()
    assert (len(one), budget.held_bytes) == (0, 400)
    assert other.pop("b") == [400]
    assert budget.held_bytes == 0


def test_the_growth_of_a_value_counts_towards_the_budget() -> None:
    budget = Budget(max_bytes=1_000)
    recent = sized(budget)
    value = [100]
    recent["old"], recent["growing"] = [400], value

    for _ in range(20):
        value[0] += 40
        recent.grow("growing", 40)
        assert recent.get("growing") is value

    assert recent.get("old") is None
    assert budget.held_bytes == 900


def test_the_shrinking_of_an_old_value_is_counted() -> None:
    budget = Budget(max_bytes=1_000)
    recent, value = sized(budget), [400]
    recent["old"] = value
    recent.go_on(0)
    recent.go_on(FORGOTTEN_AFTER_NS)

    value[0] = 0
    recent.grow("old", -400)
    recent["new"] = [100]
    recent.go_on(2 * FORGOTTEN_AFTER_NS)

    assert budget.held_bytes == 100


def test_a_value_that_is_set_again_counts_once() -> None:
    budget = Budget(max_bytes=1_000)
    recent = sized(budget)

    for size in (300, 200, 100):
        recent["a"] = [size]

    del recent["a"]
    assert (budget.held_bytes, recent.forgotten) == (0, 0)

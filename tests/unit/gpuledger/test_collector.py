"""The collector does not rescan long-lived objects, and no garbage is frozen with them."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from gpuledger.programs import freeze_collector


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _frozen_for_one_test() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.disable()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


def test_garbage_is_collected_before_the_rest_is_frozen() -> None:
    garbage = weakref.ref(Cycle())
    freeze_collector(20_000)

    assert garbage() is None
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold()[0] == 20_000


def test_later_garbage_is_still_found() -> None:
    freeze_collector(10_000, 20, 20)
    garbage = weakref.ref(Cycle())
    gc.collect()

    assert garbage() is None
    assert gc.get_threshold() == (10_000, 20, 20)

"""Whatever the library does at a start is a start that failed, and nothing worse."""

import threading

import pytest

from agent.nvml.calls import LibraryLostError
from agent.nvml.library import Nvml
from agent.nvml.restarts import LibraryKeeper
from agent.nvml.unbind import Wish
from tests.fakes.nvml import FakeGpu, FakeNvml

PATIENCE_SECONDS = 5


class StrangeNvml(FakeNvml):
    """Gives what the binding says that it never does."""

    def __init__(self, **answers: object) -> None:
        super().__init__(FakeGpu("GPU-0"))
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)


def test_an_answer_that_no_binding_should_give_is_a_start_that_failed() -> None:
    keeper = LibraryKeeper(Nvml(StrangeNvml(nvmlDeviceGetCount="one")), users=())
    with pytest.raises(LibraryLostError, match="TypeError: 'str' object"):
        keeper.open().result(PATIENCE_SECONDS)
    keeper.end()


def test_events_that_nobody_can_read_are_listened_to_no_more() -> None:
    library = StrangeNvml(
        nvmlSystemEventSetCreate=object(),
        nvmlSystemRegisterEvents=None,
        nvmlSystemEventSetWait=[object()],
        nvmlSystemEventSetFree=None,
    )
    keeper = LibraryKeeper(Nvml(library), users=())
    keeper.open().result(PATIENCE_SECONDS)
    assert keeper.unbind_unheard is None
    assert keeper.look() is Wish.NOTHING
    keeper.open().result(PATIENCE_SECONDS)
    assert keeper.look() is Wish.NOTHING
    keeper.end()


def test_the_keeper_is_stuck_by_a_look_that_outlasts_a_tick_and_not_by_one_that_began_in_it() -> None:
    library, returns = StrangeNvml(nvmlSystemEventSetFree=None), threading.Event()
    library.nvmlSystemEventSetCreate = lambda _version: object()  # type: ignore[attr-defined]
    library.nvmlSystemRegisterEvents = lambda *_: None  # type: ignore[attr-defined]
    library.nvmlSystemEventSetWait = lambda *_: [] if returns.wait() else []  # type: ignore[attr-defined]
    keeper = LibraryKeeper(Nvml(library), users=())
    keeper.open().result(PATIENCE_SECONDS)
    keeper.look()
    assert not keeper.is_stuck
    keeper.look()
    assert keeper.is_stuck
    returns.set()
    keeper.close().result(PATIENCE_SECONDS)
    assert not keeper.is_stuck
    keeper.end()

"""Python's search for garbage in cycles, for processes whose work makes none."""

import gc


def settle_collector(*thresholds: int) -> None:
    """Have the collector leave alone what there is by now, and search the rest less often.

    To be called once what stays is there: a cache that was read, a machine that was opened. What
    is garbage by then is collected first, as what is left alone would never be. The thresholds are
    those of `gc.set_threshold`. Blocks for as long as one full search takes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds)

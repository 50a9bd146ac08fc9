"""The number of examples of a Hypothesis law: all with `--extended`, otherwise a quarter.

Each run draws new examples, except in derandomized laws, which always draw the same few.
"""

from typing import Final

from hypothesis import HealthCheck, settings

FEW: Final = "few"
ALL: Final = "all"
_USUAL: Final = 100
_PART: Final = 4
# With the default deadline of 200 ms for an example, a law would fail on a busy machine.
_PATIENT: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def register_profiles() -> None:
    """Set the default number of examples for laws that do not set it: that of `examples(100)`."""
    settings.register_profile(FEW, _PATIENT, max_examples=_USUAL // _PART)
    settings.register_profile(ALL, _PATIENT, max_examples=_USUAL)
    settings.load_profile(FEW)


def examples(number: int) -> settings:
    """Return the settings of a law that gets this number of examples with `--extended`."""
    has_all = settings.get_current_profile_name() == ALL
    return settings(max_examples=number if has_all else -(-number // _PART))

"""What follows from how to reach the brokers."""

import pytest

from gpuledger.settings import KafkaSettings


@pytest.mark.parametrize(("session_seconds", "heartbeat_seconds"), [(6, 2), (9, 3), (30, 3)])
def test_two_heartbeats_of_a_session_may_be_lost_and_none_is_rare(
    session_seconds: float, heartbeat_seconds: float
) -> None:
    settings = KafkaSettings(session_timeout_seconds=session_seconds)

    assert settings.heartbeat_seconds == heartbeat_seconds

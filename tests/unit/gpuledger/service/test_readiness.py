"""Ready means: there are checks, and all of them are ok."""

from gpuledger.service import Readiness


def test_nothing_is_ready_before_anything_was_checked() -> None:
    assert not Readiness().is_ready()


def test_a_new_check_has_failed_until_it_is_said_to_be_ok() -> None:
    readiness = Readiness()
    check = readiness.check("kafka")
    assert not readiness.is_ready()
    check.ok()
    assert readiness.is_ready()


def test_one_failed_check_is_enough_not_to_be_ready() -> None:
    readiness = Readiness()
    readiness.check("kafka").ok("3 brokers")
    readiness.check("pods").failed("no answer")

    assert readiness.report() == {
        "ready": False,
        "checks": {
            "kafka": {"ok": True, "detail": "3 brokers"},
            "pods": {"ok": False, "detail": "no answer"},
        },
    }


def test_a_check_is_made_once_for_each_name() -> None:
    readiness = Readiness()
    readiness.check("kafka").ok()
    readiness.check("kafka").failed("gone")

    assert readiness.check("kafka").detail == "gone"

"""What became of a sink's sends, in words."""

from cli.demo.sending import SinkWatch, problem
from sinks.metrics import RETRIES_TOTAL


def failing(*details: str) -> str:
    """Return what is said of a sink whose checks say this."""
    watch = SinkWatch(sink="nowhere", receiver="http://a:9")
    for number, detail in enumerate(details):
        watch.readiness.check(f"check-{number}").failed(detail)
    RETRIES_TOTAL.labels(sink="nowhere").inc(2)
    return problem(watch.line(), events=1) or ""


def test_what_several_checks_say_of_the_receiver_is_said_once() -> None:
    said = "nowhere: nothing has reached http://a:9 in 2 tries: no route; Kafka is away"
    assert failing(*["http://a:9: no route"] * 2, "Kafka is away") == said


def test_a_long_answer_keeps_its_first_and_last_words() -> None:
    said = failing("refused: " + "word " * 90 + "at the end")
    assert " … " in said
    assert said.endswith("word at the end")

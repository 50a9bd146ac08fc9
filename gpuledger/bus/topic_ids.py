"""The identities of the topics that are read, and which of them are of other topics by now. Pure.

Brokers before Kafka 2.8 cannot be asked for identities, and some topics have none: what is not
known is no other topic. It is taken over when it becomes known, as at an upgrade of the brokers.
"""

from collections.abc import Mapping

from gpuledger.bus.protocol import is_other_topic

Found = Mapping[str, str | None]
"""The identity of each topic that exists; `None` for a topic that has none."""


class TopicIds:
    """What was known of the topics when partitions were assigned, and has become known since."""

    def __init__(self, found: Found | None) -> None:
        """Take what the brokers answered; `None` where they cannot be asked."""
        self.by_topic: dict[str, str | None] = dict(found or {})
        self._could_ask = found is not None

    def update(self, found: Found) -> frozenset[str]:
        """Return the topics that are others now; where there are none, take over what is new.

        A topic that was absent is another one as well, also without an identity.
        """
        others = frozenset(topic for topic in found if self._is_other(topic, found[topic]))
        if not others:
            self.by_topic |= {
                topic: own or self.by_topic.get(topic) for topic, own in found.items()
            }
            self._could_ask = True
        return others

    def _is_other(self, topic: str, topic_id: str | None) -> bool:
        if topic not in self.by_topic:
            return self._could_ask
        return is_other_topic(self.by_topic[topic], topic_id)

"""Which topics those are that partitions were assigned of: one that is made anew is another one."""

from collections.abc import Mapping

from gpuledger.bus.protocol import is_other_topic

Found = Mapping[str, str | None]
"""The identity of each topic that exists; `None` for a topic that has none."""


class TopicIds:
    """What was known of the topics when partitions were assigned, and has become known since.

    Brokers before Kafka 2.8 cannot be asked for identities, and some topics have none: what is not
    known is no other topic. It is taken over when it becomes known, as at an upgrade of the
    brokers.
    """

    def __init__(self, found: Found | None) -> None:
        """Take what the brokers answered; `None` where they cannot be asked."""
        self.by_topic: dict[str, str | None] = dict(found or {})
        self._could_query = found is not None

    def update(self, found: Found) -> frozenset[str]:
        """Return the topics that are others now; where there are none, take over what is new.

        A topic that was absent is another one as well, also without an identity.
        """
        others = frozenset(
            topic
            for topic, topic_id in found.items()
            if (
                is_other_topic(self.by_topic[topic], topic_id)
                if topic in self.by_topic
                # Absent before, where that was known: brokers that could not be asked said nothing.
                else self._could_query
            )
        )
        # With others the client is opened anew, and begins with what it finds then.
        if not others:
            self.by_topic |= {
                topic: own or self.by_topic.get(topic) for topic, own in found.items()
            }
            self._could_query = True
        return others

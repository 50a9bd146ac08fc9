"""The ids of a consumer's topics, by which it detects a topic that was recreated."""

from collections.abc import Mapping

from gpuledger.bus.protocol import is_other_topic

Found = Mapping[str, str | None]
"""The id of each existing topic; `None` for a topic that has none."""


class TopicIds:
    """The topic ids known when the partitions were assigned, and ids that became known since then.

    Brokers before Kafka 2.8 do not report topic ids, and some topics have none. A topic with an
    unknown id counts as unchanged. Its id is recorded when it becomes known, for example after the
    brokers are upgraded.
    """

    def __init__(self, found: Found | None) -> None:
        """Start with the ids that the brokers reported; `None` if they do not report topic ids."""
        self.by_topic: dict[str, str | None] = dict(found or {})
        self._could_query = found is not None

    def update(self, found: Found) -> frozenset[str]:
        """Return the topics that were recreated; if there are none, record newly known ids.

        A topic that was absent before counts as recreated, even if it has no id.
        """
        others = frozenset(
            topic
            for topic, topic_id in found.items()
            if (
                is_other_topic(self.by_topic[topic], topic_id)
                if topic in self.by_topic
                # The topic was absent before, unless the brokers could not be queried at that time.
                else self._could_query
            )
        )
        # If a topic was recreated, the client is reopened and reads all ids again.
        if not others:
            self.by_topic |= {
                topic: own or self.by_topic.get(topic) for topic, own in found.items()
            }
            self._could_query = True
        return others

"""aiokafka's clients within ours, to break what no broker breaks on request."""
# ruff: noqa: ANN401, SLF001  # aiokafka is untyped, and the tests break its internals

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiokafka

if TYPE_CHECKING:
    from gpuledger.bus.kafka_consumer import KafkaConsumer
    from gpuledger.bus.kafka_producer import KafkaProducer, KafkaTransactions
    from gpuledger.bus.protocol import TopicPartition


def client_of(holder: KafkaProducer | KafkaConsumer | KafkaTransactions) -> Any:
    assert holder._client is not None
    return holder._client


def lose_sequence(of: KafkaProducer | KafkaTransactions, partition: TopicPartition) -> None:
    """Like after a batch that expired without a leader: the brokers expect a number in between."""
    manager = client_of(of)._txn_manager
    manager.increment_sequence_number(aiokafka.TopicPartition(*partition), 5)


def is_in_transaction(writer: KafkaTransactions) -> bool:
    return bool(client_of(writer)._txn_manager.is_in_transaction())


def end_fetching(consumer: KafkaConsumer) -> None:
    client_of(consumer)._fetcher._fetch_task.cancel()


def coordinator_of(consumer: KafkaConsumer) -> Any:
    return client_of(consumer)._coordinator


def listener_of(consumer: KafkaConsumer) -> Any:
    """Return the listener that the client notifies about its partitions."""
    return client_of(consumer)._subscription.listener

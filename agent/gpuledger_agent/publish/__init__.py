"""Publishes messages to Kafka: the send queue, its on-disk spool, and the loop that sends them."""

"""Flat rows for SQL engines that read Kafka: one JSON object an entry, on a topic of its own."""

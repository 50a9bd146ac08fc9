"""Batch jobs over the store. Never reads Kafka."""

"""The bus: a small protocol, and Kafka and a bus in memory that fill it."""

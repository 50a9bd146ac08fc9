"""The bus: a small protocol with two implementations, Kafka and an in-memory bus."""

"""Bills from the store, as batch jobs and over HTTP. Never reads Kafka."""

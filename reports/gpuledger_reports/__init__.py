"""Makes bills from the store, for commands and over HTTP. Does not read Kafka."""

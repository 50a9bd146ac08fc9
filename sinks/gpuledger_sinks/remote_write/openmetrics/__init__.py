"""A page in OpenMetrics or Prometheus' text format in the place of Kafka, to try a receiver."""

"""Metrics for OpenTelemetry's collector, by OTLP in a Kafka topic."""

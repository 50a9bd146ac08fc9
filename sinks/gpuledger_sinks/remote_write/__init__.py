"""Samples for Prometheus and compatible receivers, by remote-write 2.0 or 1.0."""

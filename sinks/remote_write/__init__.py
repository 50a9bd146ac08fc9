"""Samples for Prometheus and its kin, by remote-write 1.0."""

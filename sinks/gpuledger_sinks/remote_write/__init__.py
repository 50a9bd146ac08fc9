"""Samples for Prometheus and its kin, by remote-write 2.0 or 1.0."""

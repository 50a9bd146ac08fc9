"""Scenarios: loading and validating them."""

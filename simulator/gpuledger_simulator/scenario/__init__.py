"""Loads and checks scenarios."""

"""Turns samples into events: `podwatch` publishes pods, `join` attributes GPU use to accounts."""

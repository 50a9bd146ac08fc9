"""Turns samples into events: `podwatch` publishes pods, `join` books GPU use on accounts."""

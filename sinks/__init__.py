"""Carry events to their receivers; each sink is a consumer group of its own."""

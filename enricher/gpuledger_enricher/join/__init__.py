"""Joins samples with pods and books each device on its accounts. Talks to no API server."""

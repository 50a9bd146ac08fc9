"""Joins samples with pods and books each device on its accounts. Never calls the API server."""

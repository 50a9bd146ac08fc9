"""Joins samples with pods, and attributes the use of each GPU. Never calls the API server."""

"""Joins samples with pods and books the use of each GPU. It never calls the API server."""

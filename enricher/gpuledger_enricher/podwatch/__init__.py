"""Lists and watches pods, nodes and namespaces in the API server, and publishes their records."""

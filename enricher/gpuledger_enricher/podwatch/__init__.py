"""Lists and watches objects in the API server and publishes their records. Does not book use."""

"""Lists and watches the API server and publishes slim pod records. Books nothing."""

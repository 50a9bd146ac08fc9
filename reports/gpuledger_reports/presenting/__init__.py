"""Bills as text, JSON, CSV, Parquet, HTML and FOCUS, and explanations of their lines."""

"""Code that all components share: records, topics, bus, settings, lifecycle."""

# Repeated from pyproject.toml, because reading the version from the installed metadata would import
# modules for zip files, compression and e-mail, which would stay in memory on every node.
__version__ = "0.1.0"

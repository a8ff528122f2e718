"""The package version, in a file without imports so that builds can read it."""

__version__ = "0.1.0"

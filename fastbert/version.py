"""The version of the package; the file has no imports, so that builds can read it."""

__version__ = "0.1.0"

"""Adapters to host libraries (transformers, sentence-transformers). Nothing lives here yet."""

"""Adapters to host libraries: the only room that imports transformers."""

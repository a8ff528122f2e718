"""Checkpoints in the layout of Hugging Face: their files, and the names of their weights."""

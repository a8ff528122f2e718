"""Checkpoints in Hugging Face's layout: files, and the names of the weights in them."""

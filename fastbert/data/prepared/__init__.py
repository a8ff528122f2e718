"""Prepared corpora: sharded token files, the examples drawn from them, and their batches."""

"""Batch jobs over the lines of a file that go on after an interruption: encode and classify."""

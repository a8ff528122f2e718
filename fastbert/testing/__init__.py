"""Cases, the tolerance rule and reference models, by which tests and benchmarks judge results."""

"""Cases, tolerances and reference models, with which tests and benchmarks judge results."""

"""Cases, tolerances and reference models, by which the tests and benchmarks judge results."""

"""Tools of the benchmarks: timing, other implementations, limits, predictions and plots."""

"""What measures: timing, peers, limits, the machine, plots, and the contests of benchmarks/."""

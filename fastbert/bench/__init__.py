"""The parts of every measurement: timing, peers, limits, the machine, plots and contest rows."""

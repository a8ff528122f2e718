"""The parts of every measurement: timing, peers, limits, predictions, plots and contest rows."""

"""The parts of CUDA graphs that inference and training share: buckets, memory, recordings."""

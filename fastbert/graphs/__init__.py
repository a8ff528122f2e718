"""Code for CUDA graphs that inference and training share: buckets, input memory, recordings."""

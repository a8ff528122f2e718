// Stands in for a header that torch's CUDA builds generate and its CPU wheel lacks.

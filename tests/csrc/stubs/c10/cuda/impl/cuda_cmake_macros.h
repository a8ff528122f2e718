// This file replaces a header that CUDA builds of torch generate and that torch's CPU wheel lacks.

#include "collective.cuh"

FASTBERT_PRODUCT(cooperative_brain, bfloat16_t, bfloat16_t, bfloat16_t, float, Column, Row,
                 Shape<_128, _128, _64>, Cooperative, TmaCooperative)

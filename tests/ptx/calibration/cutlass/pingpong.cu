#include "collective.cuh"

FASTBERT_PRODUCT(pingpong_half, half_t, half_t, half_t, float, Row, Column, Shape<_64, _128, _64>,
                 PingPong, Tma)

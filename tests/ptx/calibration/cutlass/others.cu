#include "collective.cuh"

FASTBERT_PRODUCT(specialized_tf32, float, float, float, float, Row, Column, Shape<_64, _64, _32>,
                 Specialized, NoTma)
FASTBERT_PRODUCT(specialized_tf32_other_majors, float, float, float, float, Column, Row,
                 Shape<_64, _64, _32>, Specialized, NoTma)
FASTBERT_PRODUCT(specialized_int8, int8_t, int8_t, int32_t, int32_t, Row, Column,
                 Shape<_64, _64, _128>, Specialized, NoTma)
FASTBERT_PRODUCT(specialized_fp8, float_e4m3_t, float_e5m2_t, half_t, float, Row, Column,
                 Shape<_64, _64, _128>, Specialized, Tma)

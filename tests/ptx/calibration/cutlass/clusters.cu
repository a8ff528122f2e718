#include "collective.cuh"

// The blocks of a cluster load tiles by multicast: each block loads a part of a shared tile of A or
// B for all blocks that share this tile.
FASTBERT_PRODUCT(cluster_of_rows, half_t, half_t, half_t, float, Row, Column, Shape<_64, _64, _64>,
                 PingPong, Tma, Shape<_2, _1, _1>)
FASTBERT_PRODUCT(cluster_of_rows_and_columns, half_t, half_t, half_t, float, Row, Column,
                 Shape<_64, _64, _64>, Specialized, Tma, Shape<_2, _2, _1>)

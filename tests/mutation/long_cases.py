"""The faults that the selection of `make test` misses and the long cases catch, with the reasons.

`make mutate` fails if it finds another such fault, or if the selection catches one of these.
"""

from __future__ import annotations

LONG_CASES: dict[str, str] = {
    "free_blocks_are_lost_at_the_end_of_a_call": (
        "240 calls of a model, after which memory would have grown, take 10 s on a busy machine"
    ),
    "pool_of_threads_not_ended_before_a_fork": (
        "a process that forks behind two threads takes 26 s on a busy machine"
    ),
    "rows_of_attention_times_stride_in_32_bit": (
        "attention on tensors beyond 2^31 elements takes 9 s in the interpreter"
    ),
}

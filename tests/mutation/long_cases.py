"""The faults that the cases of `make test` do not catch but long cases do, with the reasons.

`make mutate` fails if another fault is of this kind, or if `make test` catches a fault in this
list.
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

"""The faults that the selection of `make test` misses and the long cases catch, with the reasons.

`make mutate` fails if it finds another such fault, or if the selection catches one of these.
"""

from __future__ import annotations

LONG_CASES: dict[str, str] = {
    "rows_of_attention_times_stride_in_32_bit": (
        "attention on tensors beyond 2^31 elements takes 9 s in the interpreter"
    ),
}

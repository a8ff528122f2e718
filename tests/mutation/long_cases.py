"""The faults that the selection of `make test` misses and the long cases catch, with the reasons.

`make mutate` fails if it finds another such fault, or if the selection catches one of these.
"""

from __future__ import annotations

LONG_CASES: dict[str, str] = {}

"""Mistakes that tests insert into the backward for Hopper at head dim 128, whose consumers differ.

The matches of a regular expression are counted as in `_hopper_backward_faults`.
"""

from __future__ import annotations

from _broken_ptx import Fault
from _hopper_faults import ARRIVE, REGISTERS, WAIT

WAITS = ("keys full", "tile landed", "statistics", "ds")
ARRIVALS = ("ds", "tile empty", "keys empty")
GROUPS = ("scores", "gradients of weights", "dv", "dq", "dk")
ENDS = (("scores", 2), ("gradients of weights", 2), ("dq", 2), ("dk", 1))

BACKWARD_FAULTS = [
    *REGISTERS,
    *(
        Fault(f"no wait ({name})", WAIT, "setp.eq.u32 p, 0, 0;", (4 + i,))
        for i, name in enumerate(WAITS)
    ),
    *(Fault(f"no arrival ({name})", ARRIVE, "", (2 + i,)) for i, name in enumerate(ARRIVALS)),
    *(
        Fault(f"no end of a group of products ({name})", r"wgmma\.commit_group\S*;", "", (i,))
        for i, name in enumerate(GROUPS)
    ),
    *(
        Fault(
            f"a wait for products too early ({name})",
            r"wgmma\.wait_group\S* \d;",
            f"wgmma.wait_group.sync.aligned {pending};",
            (i,),
        )
        for i, (name, pending) in enumerate(ENDS)
    ),
    Fault("no fence (ds)", r"fence\.proxy\.async\.shared::cta;", "", (1,)),
    Fault("ds is not transposed", r"(m64n64k16[^;]*p, 1, 1, )1, 1;", r"\g<1>0, 1;"),
    Fault("the keys of dq are not transposed", r"(m64n64k16[^;]*p, 1, 1, )1, 1;", r"\g<1>1, 0;"),
    Fault("dout and queries are not transposed", r"(m64n128k16[^;]*p, 1, 1, )1;", r"\g<1>0;"),
    *(
        Fault(
            f"exchanged registers of the {name}",
            r"(m64n128k16[^;]*\}, \{)(%r\d+), (%r\d+)",
            r"\1\3, \2",
            (i,),
        )
        for i, name in ((0, "weights"), (4, "gradients"))
    ),
]

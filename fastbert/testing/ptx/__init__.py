"""The GPU kernels of fastbert on ptxmachine, which executes PTX on the CPU.

ptxmachine is a distribution of its own, in the folder of that name. This room launches the Triton
kernels and the CUDA C++ operators of fastbert on CPU tensors, and counts what the kernels do.
"""

from __future__ import annotations

from importlib.util import find_spec

# In a checkout, the folder ptxmachine looks like a package without code.
_spec = find_spec("ptxmachine")
if _spec is None or _spec.origin is None:
    raise ImportError(
        "the PTX machine is not installed: pip install ./ptxmachine in a checkout of fastbert"
    )

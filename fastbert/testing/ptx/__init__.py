"""The GPU kernels of fastbert on ptxmachine, which executes PTX on the CPU.

ptxmachine is a separate distribution, in the folder ptxmachine of the repository. This package
launches the Triton kernels and the CUDA C++ operators of fastbert on CPU tensors, and counts the
instructions and memory accesses of the kernels.
"""

from __future__ import annotations

from importlib.util import find_spec

# In a checkout, Python finds the folder ptxmachine as a namespace package if the distribution is
# not installed.
_spec = find_spec("ptxmachine")
if _spec is None or _spec.origin is None:
    raise ImportError(
        "the PTX machine is not installed: pip install ./ptxmachine in a checkout of fastbert"
    )

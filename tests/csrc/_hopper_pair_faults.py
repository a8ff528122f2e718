"""Faults of masks of pairs in attention for Hopper, put into the PTX that nvcc makes of it.

The matches of an expression are numbered as in `_hopper_faults` and `_hopper_backward_faults`.
"""

"""The exceptions of ptxmachine: errors in a PTX text, and faults of a running kernel."""

from __future__ import annotations


class PtxError(Exception):
    """The base class of the errors in a PTX text and of the faults of a running kernel.

    Attributes:
        line: Line of the PTX text, from 1, or None if the error has no line.
    """

    line: int | None = None


class PtxSyntaxError(PtxError, ValueError):
    """The machine cannot run the text.

    The reason is a statement that cannot be parsed, an instruction that the machine does not
    support, operands that do not fit their instruction, or a limit of the machine.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        """Make the message, which begins with the number of the line."""
        super().__init__(message if line is None else f"line {line}: {message}")
        self.line = line


class PtxFault(PtxError, RuntimeError):
    """A kernel did something that is wrong on a GPU.

    Attributes:
        kind: The kind of fault, for example ``"race"`` or ``"out of bounds"``.
        kernel: Name of the kernel.
        line: Line of the PTX text, or None if the fault belongs to no instruction.
        source: ``file:line`` of the CUDA or Triton source, or None if no ``.loc`` precedes the
            instruction.
        block, warp, lane: Numbers of the block, warp and lane with the fault; -1 if not known.
    """

    def __init__(
        self, kind: str, message: str, kernel: str, text: str, line: int | None,
        source: str | None, block: int, warp: int, lane: int,
    ) -> None:  # fmt: skip
        """Make the message, which ends with the kernel, line, block, warp and lane of the fault."""
        where = f"{kernel}"
        if line is not None:
            where += f", PTX line {line} ({text})"
        if source:
            where += f", {source}"
        for name, value in (("block", block), ("warp", warp), ("lane", lane)):
            if value >= 0:
                where += f", {name} {value}"
        super().__init__(f"{kind}: {message} [{where}]")
        self.kind, self.kernel, self.line, self.source = kind, kernel, line, source
        self.block, self.warp, self.lane = block, warp, lane

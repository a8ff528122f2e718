from collections.abc import Sequence
from typing import Any

class Program:
    @property
    def unsupported(self) -> list[tuple[int, str]]: ...
    @property
    def misfits(self) -> list[tuple[int, str]]: ...

def decode(code: list[tuple[Any, ...]], bits: Sequence[int]) -> Program: ...
def mnemonics() -> list[str]: ...
def run(
    program: Program,
    grid: tuple[int, int, int],
    cluster: tuple[int, int, int],
    block: tuple[int, int, int],
    params: bytes,
    shared_bytes: int,
    static_shared: int,
    local_bytes: int,
    memory: Sequence[tuple[int, int, bool, str, bool]],
    seed: int,
    approximate: float,
    accumulate: int,
    races: bool,
    count: bool,
    limit: int,
    threads: int,
    blocks: Sequence[int],
    registers: int,
    /,
) -> tuple[dict[str, Any], tuple[str, str, int, int, int, int] | None]: ...
def read_capsule(capsule: Any) -> tuple[int, list[int], list[int], int, int, int]: ...
def read_buffer(buffer: Any) -> tuple[int, list[int], list[int], int, str, bool]: ...

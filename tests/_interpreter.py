"""Triton's interpreter without the work that it repeats, which took a third of its time.

The interpreter replaces the functions of ``triton.language`` when a launch begins, and looks for
all of them again at every call of a device function inside the launch.
"""

from __future__ import annotations

from typing import Any


def replace_once_a_launch() -> None:
    """Let a launch of the interpreter replace the functions of each module once.

    Another release of Triton may lack what this changes, and stays as it is.
    """
    try:
        from triton import language
        from triton.runtime import interpreter

        replace = interpreter._patch_lang
    except (ImportError, AttributeError):
        return
    done: set[str] = set()

    def replace_once(kernel: Any) -> Any:
        wanted = {
            module.__name__
            for module in kernel.__globals__.values()
            if module is language or module is language.core
        }
        if wanted and wanted <= done:
            # The interpreter does not restore what a call inside a launch has replaced.
            return None
        scope = replace(kernel)
        if not done:
            restore = scope.restore

            def restore_all() -> None:
                done.clear()
                restore()

            scope.restore = restore_all
        done.update(wanted)
        return scope

    interpreter._patch_lang = replace_once

"""The name of a model, from its path and from the model from which it was fine-tuned."""

from __future__ import annotations

import re
from pathlib import Path

# Folders such as "model", "checkpoint-500", "best_model" and "0_Transformer" do not say which model
# they hold. A snapshot of the hub has the name of its commit.
_GENERIC = re.compile(
    r"((model|checkpoint|ckpt|encoder|transformer|weight|snapshot|output|out|final|best|last|latest"
    r"|epoch|step|run|tmp)s?|[\W\d_])+|[0-9a-f]{40}",
    re.IGNORECASE,
)


def model_name(place: str, source: str = "") -> str | None:
    """Return the name of a model.

    The name is the last part of `place`, unless this part is a generic word such as ``model``. In
    that case, the name comes from `source`, or from the nearest parent folder whose name is not
    generic. `place` comes before `source`, because the `source` of a fine-tuned model is the
    pre-trained model.

    Args:
        place: Folder or hub id of the model.
        source: Folder or hub id in ``_name_or_path`` of its configuration; empty if there is none.

    Returns:
        The name, or None if every part is a generic word.
    """
    own = _parts(str(Path(place).resolve()) if place and Path(place).is_dir() else place)
    candidates = [*own[:1], *_parts(source), *own[1:]]
    return next((name for name in candidates if not _GENERIC.fullmatch(name)), None)


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return list(reversed(Path(path).parts))

"""The pages of the documentation, README among them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))  # the hooks of mkdocs are tested, too

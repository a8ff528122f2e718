"""Setup for tests of the documentation's pages, README included."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))  # for imports of mkdocs' hooks

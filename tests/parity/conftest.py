"""The fixtures of small models for the tests of parity, shared with the tests of integrations."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

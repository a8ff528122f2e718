"""The small models of the tests of integrations, which the tests of parity share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

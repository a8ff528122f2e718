"""Comparison of a user's model in stock code and in accelerated code, by the tolerance rule.

The package uses `fastbert.integrations`, which accelerates models, and `fastbert.testing.compare`,
which contains the tolerance rule.
"""

from fastbert.parity.report import LeftOut, Report, Row
from fastbert.parity.verification import findings, verify

__all__ = ["LeftOut", "Report", "Row", "findings", "verify"]

"""See what attention does: weights, measures and predictions of a text in one HTML file."""

from fastbert.viewer.show import Page, view

__all__ = ["Page", "view"]

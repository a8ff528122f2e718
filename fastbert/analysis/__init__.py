"""Analyses of trained models: explanations of predictions, and the geometry of embeddings."""

from fastbert.analysis.agreement import jensen_shannon, kendall, spearman, total_variation
from fastbert.analysis.explain import Attribution, Explanation, explain
from fastbert.analysis.explain_page import write_page
from fastbert.analysis.rollout import rollout
from fastbert.analysis.subject import Subject

__all__ = [
    "Attribution",
    "Explanation",
    "Subject",
    "explain",
    "jensen_shannon",
    "kendall",
    "rollout",
    "spearman",
    "total_variation",
    "write_page",
]

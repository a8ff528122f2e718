"""Analyses of trained models: explanations of predictions, and the geometry of embeddings."""

from fastbert.analysis.agreement import jensen_shannon, kendall, spearman, total_variation
from fastbert.analysis.attention_tests import (
    adversarial_attention,
    frozen_weights,
    make_uniform,
    seed_variance,
    uniform_weights,
)
from fastbert.analysis.explain import Attribution, Explanation, explain
from fastbert.analysis.explain_page import write_page
from fastbert.analysis.fitting import Distance, Examples, FitOptions, Starts
from fastbert.analysis.occurrences import ContextEncoder
from fastbert.analysis.probe import DistanceProbe, ProbeScore, fit_probe, score, tree_distances
from fastbert.analysis.rollout import rollout
from fastbert.analysis.senses import (
    SenseAccuracy,
    Usage,
    nearest_centroids,
    read_usages,
    sense_accuracy,
)
from fastbert.analysis.subject import Subject
from fastbert.analysis.word_map import Occurrence, WordMap, word_map, write_map

__all__ = [
    "Attribution",
    "ContextEncoder",
    "Distance",
    "DistanceProbe",
    "Examples",
    "Explanation",
    "FitOptions",
    "Occurrence",
    "ProbeScore",
    "SenseAccuracy",
    "Starts",
    "Subject",
    "Usage",
    "WordMap",
    "adversarial_attention",
    "explain",
    "fit_probe",
    "frozen_weights",
    "jensen_shannon",
    "kendall",
    "make_uniform",
    "nearest_centroids",
    "read_usages",
    "rollout",
    "score",
    "seed_variance",
    "sense_accuracy",
    "spearman",
    "total_variation",
    "tree_distances",
    "uniform_weights",
    "word_map",
    "write_map",
    "write_page",
]

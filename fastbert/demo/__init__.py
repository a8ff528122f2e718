"""The demo: it trains a small BERT, reopens the model in transformers, and checks and times it."""

from fastbert.demo.demo import run_demo
from fastbert.demo.report import DemoReport

__all__ = ["DemoReport", "run_demo"]

"""The demo, which trains a small BERT, reopens it in transformers, checks and times fastbert."""

from fastbert.demo.demo import run_demo
from fastbert.demo.report import DemoReport

__all__ = ["DemoReport", "run_demo"]

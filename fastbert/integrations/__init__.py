"""Adapters to other libraries; the only package of fastbert that imports transformers."""

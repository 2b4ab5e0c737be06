"""Configurations: one file a model or family of experiments, without JAX."""

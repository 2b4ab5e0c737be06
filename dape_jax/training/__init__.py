"""Optimiser, training step, checkpoints and the loop."""

"""Commands. Flags live here and nowhere else."""

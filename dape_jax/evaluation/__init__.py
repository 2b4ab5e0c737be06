"""Length extrapolation: scores at many lengths, their statistics, reports, tables and plots."""

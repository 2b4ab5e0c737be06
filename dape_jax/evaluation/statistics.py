"""Perplexity and its standard error over sampling units: documents, or windows of a stream."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Fields: ``nll``, mean negative log-likelihood of a token in nats; ``perplexity``, its exponential; and the
    standard errors of both over sampling units, NaN for a single one."""

    nll: float
    nll_standard_error: float
    perplexity: float
    perplexity_standard_error: float


def perplexity(nll_sums: np.ndarray, token_counts: np.ndarray) -> Perplexity:
    """From each unit's summed negative log-likelihood and number of scored tokens, both [units].

    Tokens of one document are not independent, so documents are the units where windows lie within them. Windows of
    a stream are units themselves; neighbours of one document are not independent, and their error is too small by
    that. The standard error is the ratio estimator's, and that of the perplexity follows from it to first order
    (perplexity x standard error of the mean).
    """
    total = token_counts.sum()
    mean = float(nll_sums.sum() / total)
    n = len(nll_sums)
    if n > 1:
        residuals = nll_sums - mean * token_counts
        error = math.sqrt(n / (n - 1) * float((residuals**2).sum())) / float(total)
    else:
        error = math.nan
    value = math.exp(mean) if mean < 700 else math.inf
    return Perplexity(mean, error, value, value * error)

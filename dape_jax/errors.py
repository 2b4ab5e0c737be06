"""The one exception type that means "the input is wrong", not "the program is"."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: one clear line that names the field, the value and what would do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean 'x'?`` for the known name closest to ``name``, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"

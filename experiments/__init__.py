"""Commands. Flags live here and nowhere else."""

import signal
import sys

if sys.argv[0] == "-m":  # a command, not an import
    # Until it has its own handlers, Ctrl-C ends it at once, without a traceback from the middle of the imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

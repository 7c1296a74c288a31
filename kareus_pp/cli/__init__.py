"""The command line, `kareus-pp`: one module for each command."""

import os

# Before numpy is loaded: its matrices are small here, and threads of BLAS would only spin (the
# commands then take many times as long on a busy machine).
os.environ.setdefault("OMP_NUM_THREADS", "1")

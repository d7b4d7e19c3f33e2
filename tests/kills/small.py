"""The command line with experiments of seconds: the smallest profile, and re-learning that is soon given up."""

import sys

from expunge import cli, comparison
from expunge.bench import profiles
from expunge.metrics import Relearning
from expunge.tuning import Constant, Tuning
from tests.bench.tiny import TINY

if __name__ == "__main__":
    comparison.RELEARNING = Relearning(Tuning(Constant(0.05, 1)))
    profiles.PROFILES["smoke"] = TINY
    sys.exit(cli.main())

"""The command line with experiments of seconds: the smallest profile, and re-learning that is soon given up."""

import sys

from expunge.cli import commands as cli
from expunge.experiments import comparison, profiles
from expunge.metrics import Relearning
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from tests.experiments.tiny import TINY

if __name__ == "__main__":
    comparison.RELEARNING = Relearning(Tuning(Constant(0.05, 1)))
    profiles.PROFILES["smoke"] = TINY
    sys.exit(cli.main())

"""The command line with experiments of seconds: the smallest profile, and re-learning that is soon given up."""

import sys

from expunge.cli import commands as cli
from expunge.experiments import comparison, profiles
from tests.experiments.tiny import TINY

if __name__ == "__main__":
    comparison.RELEARN = {"rate": 0.05, "limit": 1}
    profiles.PROFILES["smoke"] = TINY
    sys.exit(cli.main())

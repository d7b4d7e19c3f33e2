"""Start the command line: `python -m expunge`, and the script `expunge`. Ctrl-C is heard before anything else is imported."""

import sys


def main() -> int:
    try:
        from expunge.cli import main as command
    except KeyboardInterrupt:
        print("expunge: stopped", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())

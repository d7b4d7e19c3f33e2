"""Start the command line: `python -m expunge`, and the script `expunge`. Ctrl-C while the rest is imported is one line too."""

import sys


def main() -> int:
    try:
        from expunge.runtime.exits import uninterrupted

        with uninterrupted():
            from expunge.cli.commands import main as command
    except KeyboardInterrupt:
        print("expunge: stopped", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())

"""The command `jacobiflow`, outside the package: importing that takes seconds in which Ctrl-C may come."""

import sys


def run() -> None:
    """Import the package and run the command."""
    try:
        from jacobiflow.cli.main import run as start

        start()
    except KeyboardInterrupt:
        print("jacobiflow: stopped", file=sys.stderr)
        sys.exit(130)

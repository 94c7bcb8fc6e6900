"""`python -m jacobiflow` is the command `jacobiflow`."""

from jacobiflow.cli.main import run

if __name__ == "__main__":
    run()

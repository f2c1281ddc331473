"""Where `nanopd` and `python -m nanopd` start. Even the imports can be interrupted without a traceback."""

import sys


def main() -> None:
    """The console script."""
    try:
        from nanopd import cli

        code = cli.main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()

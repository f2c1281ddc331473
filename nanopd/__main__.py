"""`python -m nanopd` is the same as `nanopd`."""

from nanopd.cli import main

main()

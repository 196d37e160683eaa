"""The command line as `python -m diffquant.cli`."""

from diffquant.cli import main

main()

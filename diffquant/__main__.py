"""`python -m diffquant`, the command line where its script is not on the path."""

from diffquant.cli import main

main()

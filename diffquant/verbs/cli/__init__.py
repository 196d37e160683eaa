"""The command line: a command for each verb, whose body imports what it needs, so that `--help` is instant."""

from diffquant.verbs.cli.command import app, main

__all__ = ["app", "main"]

"""The command line: one command for each verb. Heavy modules are imported when a verb runs, so `--help` is quick."""

from diffquant.verbs.cli.command import app, main

__all__ = ["app", "main"]

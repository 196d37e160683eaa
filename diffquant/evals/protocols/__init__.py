"""Protocols of the tasks: how the items of each are made, shown to a model and scored.

`diffquant.evals.tasks` says what a task is called, which options it has and how its results read; what it runs is
here, beside torch, under the same name.
"""

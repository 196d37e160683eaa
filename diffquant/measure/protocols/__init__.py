"""Protocols of the tasks: how the items of each are made, shown to a model and scored.

`diffquant.measure.tasks` defines each task's name, options and result columns. The module with the same name here
holds the code that runs, which imports torch.
"""

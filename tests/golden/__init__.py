"""Goldens: what each verb wrote and printed at one commit, which every change keeps or says why it does not.

`python -m tests.golden` writes them again, all or those that are named. A commit that changes one says what changed.
"""

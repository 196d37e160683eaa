"""The figures of docs/cluster.md."""

from tests.docs.page import Page
from tests.docs.raw import raw

PAGE = Page("docs/cluster.md")
_CLUSTER = raw("cluster.json")
PAGE.says(
    "With {} of them and {} cells of {} seconds each, all on two cores, {} % of the time is lost where they share a "
    "folder and {} % under Ray",
    *(_CLUSTER["settings"][name] for name in ("workers", "cells", "seconds")),
    *(100 * _CLUSTER["runs"][engine]["lost"] for engine in ("folder", "ray")),
)
PAGE.leaves("2 x 0.27 GB of weights in 21.76 GB of main memory", "an example of what is printed")

"""The figures of docs/cluster.md."""

from research.check.page import Page
from research.check.raw import raw

PAGE = Page("docs/cluster.md", guides=("A laptop", "Several GPUs", "Anywhere that sees the folder", "Ray"))
_CLUSTER = raw("cluster.json")
PAGE.says(
    "With {} of them and {} cells of {} seconds each, all on two cores, {} % of the time is lost where they share a "
    "folder and {} % under Ray",
    *(_CLUSTER["settings"][name] for name in ("workers", "cells", "seconds")),
    *(100 * _CLUSTER["runs"][engine]["lost"] for engine in ("folder", "ray")),
)
_KILLS = [raw(f"sweep-kills/{name}.json") for name in ("local", "local-again", "ray")]
_COUNTS = [sum(run["kills"].values()) for run in _KILLS]
PAGE.says(
    "That was so after each of {} kills, {} of processes on one machine and {} in a Ray cluster, {} of them of its "
    "head",
    sum(_COUNTS),
    sum(_COUNTS[:2]),
    _COUNTS[2],
    _KILLS[2]["kills"]["ray: head"],
)
PAGE.means("Every cell then has to be as in a sweep", not any(run["faults"] for run in _KILLS))
_WORKERS = {cell["path"]: cell for cell in raw("sweep-workers.json")["cells"] if cell["unit"] == "cells/min"}
PAGE.says(
    "two workers of one thread finished {} cells per minute of SmolLM2's DIFF V2 where one worker of two threads "
    "finished {}, so {} times as many",
    _WORKERS["2 workers"]["median"],
    _WORKERS["1 worker"]["median"],
    _WORKERS["2 workers"]["ratio"],
)
PAGE.means("7 cells of 20 HellaSwag items", "7 cells" in _WORKERS["1 worker"]["workload"])
PAGE.means("medians of 2 turns", len(_WORKERS["1 worker"]["values"]) == 2)
PAGE.leaves("2 x 0.27 GB of weights in 21.76 GB of main memory", "an example of what is printed")

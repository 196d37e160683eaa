"""The figures of docs/qk.md."""

from studies.qk import Measured
from tests.docs.page import Page
from tests.docs.raw import sweep

PAGE = Page("docs/qk.md")
SWEEP = sweep("figure8-qk")
MEASURED = Measured(SWEEP)
PAGE.table("rounded, 4 bits | Transformer | DIFF V1 | DIFF V2", lambda row, model: MEASURED.cell(row, model, 4))
PAGE.table("rounded | 8 bits | 6 bits | 3 bits", lambda row, head: MEASURED.cells(row, int(head[0])))

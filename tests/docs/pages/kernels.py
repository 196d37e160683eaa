"""The figures of docs/kernels.md: none was measured, since no kernel has run on a GPU."""

from tests.docs.page import Page, Unmeasured

PAGE = Page("docs/kernels.md")
PAGE.leaves("int8 within 2 %, e4m3 within 8 %", "the tests' limits")
PAGE.leaves("(2d + dv) · 2 bytes a token", "arithmetic")
PAGE.leaves("a thread reads 16 bytes", "how a kernel is built")
PAGE.leaves("Up to 1,024 tokens a GEMM", "how a kernel is built")
PAGE.leaves("99 KiB", "what devices have")
PAGE.leaves("Three steps of 64 keys", "how a kernel is built")
PAGE.leaves("Triton before 3.7 compiles", "a version")
PAGE.leaves("those of Triton 3.6.0", "a version")
PAGE.leaves("with Triton 3.6.0 as well", "a version")
PAGE.table(
    "device | configurations | what differs",
    lambda *_: Unmeasured("names of devices and versions, what launch code does, and machine code that a test reads"),
)

"""The figures of docs/kernels.md: none was measured, since no kernel has run on a GPU."""

from tests.docs.page import Page

PAGE = Page("docs/kernels.md")
PAGE.leaves("int8 within 2 %, e4m3 within 8 %", "the tests' limits")
PAGE.leaves("(2d + dv) · 2 bytes a token", "arithmetic")
PAGE.leaves("a thread reads 16 bytes", "how a kernel is built")
PAGE.leaves("Up to 1,024 tokens a GEMM", "how a kernel is built")

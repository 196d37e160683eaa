"""The figures of docs/kernels.md: none was measured, since no kernel has run on a GPU."""

from research.check.page import Page, Unmeasured

PAGE = Page("docs/kernels.md", is_guide=True)
PAGE.leaves("within limits of 2 % for int8 and 8 % for e4m3", "the tests' limits")
PAGE.leaves("(2d + dv) · 2 bytes per token", "arithmetic")
PAGE.leaves("a thread reads 16 bytes", "how a kernel is built")
PAGE.leaves("Up to 1,024 tokens, a GEMM", "how a kernel is built")
PAGE.leaves("A thread loads 16 bytes", "how a kernel is built")
PAGE.leaves("chunks of 512 bytes", "how a kernel is built")
PAGE.leaves("for 3,072 columns at 4 bits", "a size that was chosen")
PAGE.leaves("on Hopper (Triton 3.9)", "a version")
PAGE.leaves("Triton 3.6 takes V's scales", "a version")
PAGE.leaves("Triton before 3.7 this starts", "a version")
PAGE.leaves("those of Triton 3.6.0", "a version")
PAGE.leaves("with Triton 3.6.0 as well", "a version")
PAGE.table(
    "device | configurations | what differs",
    lambda *_: Unmeasured("names of devices and versions, what launch code does, and machine code that a test reads"),
)
PAGE.table(
    "machine code of the loop | before, 4 bits | now, 4 bits | before, 16 bits | now, 16 bits",
    lambda *_: Unmeasured("machine code of two versions; tests/kernels/test_decode_compiled.py bounds the newer's"),
)

"""A machine that runs PTX, what Triton's compiler makes of a kernel, on the host: in NumPy, with no GPU.

A block's threads are a NumPy axis, and an instruction is executed for all threads that stand at it. Tensors stay where
they are, in the host's memory. The machine computes what the kernel computes, asynchronous copies and products as late
as the kernel allows, and it reports (`Fault`, `Race`):

- any access outside the tensors that the launch was given, misaligned, or outside of shared memory;
- two warps that reach the same bytes, one of them to write, with nothing that orders them: barriers, mbarriers, copies
  and products that were waited for, in shared memory; in the tensors, atomics between blocks too;
- bytes that threads wrote and the tensor cores or a bulk copy reach with no `fence.proxy.async` in between;
- copies and products whose results are touched before they are waited for, and waits that never end;
- plain accesses to the memory of a valid mbarrier, one that is initialized again without `mbarrier.inval`, and one that
  a warp uses while nothing orders its initialization before;
- what a dependent launch reaches of the launch before it, with no `griddepcontrol.wait` in between.

It knows nothing of time, and not how Hopper's tensor cores round: its sums are exact until they become float32. Blocks
run one after another; threads of a warp are in step. All launches are one stream's, and a CUDA graph (`graphs`) is what
was captured, again in that order and at those addresses.

It needs NumPy, PyTorch's host tensors and Triton, nothing of diffquant. `launching.launches_run_here` is where
to begin.
"""

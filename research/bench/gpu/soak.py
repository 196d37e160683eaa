"""Thousands of launches of the warp-specialized kernels, some of which once never ended on an H100.

    python -m research.bench.gpu.soak

Each kind runs in a process of its own, which is ended where it takes longer than it may.
"""

import subprocess
import sys

LAUNCHES = 4000
SECONDS = 40
KINDS = ("triton-specialized", "triton-fp8-specialized")
LENGTHS = (8192, 65_536)


def launch(backend: str, length: int, launches: int) -> None:
    """Launch a backend's kernel over one V1 head of so many tokens again and again."""
    import torch

    from diffquant.attention import attend
    from diffquant.family.call import AttentionCall
    from diffquant.family.mask import Mask

    torch.manual_seed(0)
    q1, q2, k1, k2 = torch.randn(4, 1, 1, length, 128, device="cuda", dtype=torch.bfloat16)
    v, lam = torch.randn(1, 1, length, 256, device="cuda", dtype=torch.bfloat16), torch.tensor(0.3, device="cuda")
    call = AttentionCall([q1, q2], [k1, k2], v, lam, scale=128**-0.5, mask=Mask())
    first = attend(call, backend)
    for number in range(launches):
        if not torch.equal(attend(call, backend), first):
            raise SystemExit(f"{backend}, {length} tokens: launch {number} gave other numbers than the first")


def main() -> int:
    """Launch each kind at each length; 1 if one did not end or gave other numbers."""
    failed = 0
    for backend in KINDS:
        for length in LENGTHS:
            # As many tokens in all at each length.
            launches = LAUNCHES * LENGTHS[0] // length
            code = f"from research.bench.gpu.soak import launch; launch({backend!r}, {length}, {launches})"
            try:
                ended = subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=False).returncode == 0
                outcome = "ended" if ended else "failed"
            except subprocess.TimeoutExpired:
                ended, outcome = False, f"did not end in {SECONDS} s"
            failed += not ended
            print(f"{backend}, {length} tokens, {launches} launches: {outcome}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

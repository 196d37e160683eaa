"""Thousands of launches of the warp-specialized kernels, some of which once never ended on an H100.

    python -m research.bench.gpu.soak

Each kind runs in a process of its own, which is ended where it takes longer than it may.
"""

import subprocess
import sys

# As many tokens in all at each length.
LAUNCHES = {8192: 4000, 65_536: 500}
SECONDS = 55
# Backends, each with the scheme of its logits: every form of the kernels that wait on barriers.
KINDS = {"triton-specialized": "16", "triton-simulated-specialized": "8:row:shift", "triton-fp8-specialized": "16"}


def launch(backend: str, launches: dict[int, int], device: str = "cuda") -> None:
    """Launch a backend's kernel over one head of V1 and of V2 of so many tokens again and again."""
    import torch

    from diffquant.attention import attend
    from diffquant.family.call import AttentionCall
    from diffquant.family.mask import Mask
    from diffquant.recipe.scheme import Scheme

    torch.manual_seed(0)
    for length, count in launches.items():
        for family, width in (("V1", 256), ("V2", 128)):
            print(f"{backend}, {family}, {length} tokens, {count} launches", flush=True)
            q1, q2, k1, k2 = torch.randn(4, 1, 1, length, 128, device=device, dtype=torch.bfloat16)
            v = torch.randn(1, 1, length, width, device=device, dtype=torch.bfloat16)
            keys, lam = [k1, k2 if family == "V1" else k1], torch.tensor(0.3, device=device)
            scheme = Scheme.parse(KINDS[backend])
            call = AttentionCall([q1, q2], keys, v, lam, scale=128**-0.5, mask=Mask(), logits=scheme)
            first = attend(call, backend)
            for number in range(count):
                if not torch.equal(attend(call, backend), first):
                    raise SystemExit(f"launch {number} gave other numbers than the first")


def main() -> int:
    """Launch each kind; 1 if one did not end or gave other numbers, in what it printed last."""
    failed = 0
    for backend in KINDS:
        code = f"from research.bench.gpu.soak import LAUNCHES, launch; launch({backend!r}, LAUNCHES)"
        try:
            ended = subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=False).returncode == 0
            outcome = "ended" if ended else "failed"
        except subprocess.TimeoutExpired:
            ended, outcome = False, f"did not end in {SECONDS} s"
        failed += not ended
        print(f"{backend}: {outcome}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

import torch
from offline import compiled

from diffquant.kernels.repack import repack
from diffquant.numerics import packed_words


def weight(rows, width, bits, group, dtype):
    words = torch.zeros(rows, packed_words(width, bits), dtype=torch.int32)
    return repack(words, torch.ones(rows, width // group, dtype=dtype), bits, width)


def launches():
    from diffquant.kernels.gemv import launch_gemv
    from diffquant.kernels.gemm import launch_gemm

    for capability in (80, 90):
        for bits in (6,):
            for dtype in (torch.float16, torch.bfloat16)[:1 if capability == 90 else 2][-1:]:
                for M in (1, 16, 64, 128):
                  for g in (32,)if M > 1 else (128, 1024):
                    packed = weight(256, 3072 if g<1024 else 1024, bits, g, dtype)
                    x = torch.zeros(M, packed.shape[1], dtype=dtype)
                    yield f"{capability} {bits} {dtype} {M} {g}", capability, lambda x=x, w=packed: (launch_gemm if len(x) >16 else launch_gemv)(x, w, None)

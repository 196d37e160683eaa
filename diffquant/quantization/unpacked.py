"""What becomes of matrices that are not packed."""

import torch

from diffquant.errors import UsageError
from diffquant.quantization.checks import EMBEDDING
from diffquant.quantization.targets import targets_of
from diffquant.source.source import Source
from diffquant.source.weight_source import WeightSource
from diffquant.support.spelling import spelled


def unpacked_dtypes(source: Source | WeightSource, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Dtype of each matrix that may stay unpacked, by the tensor's name, where it is not the source's.

    What is not packed is stored in 16 bits, as the recipe has it: matrices of a float32 checkpoint become bfloat16,
    which has the same range; the model goes on to run in float32. Vectors, all but free, stay as they are, and so does
    all of a checkpoint whose architecture is unknown.

    Args:
        dtype: dtype that is wanted in place of the checkpoint's own or, where that is float32, of bfloat16.

    Raises:
        UsageError: a dtype is wanted of a checkpoint whose architecture is unknown.
    """
    if isinstance(source, WeightSource):
        if dtype is not None:
            raise UsageError(
                f"{source.path} (model_type {source.model_type!r}) is quantized by its tensors' names, and what is not "
                f"packed stays as it is; leave out {spelled('dtype')}"
            )
        return {}
    own = {name: source.checkpoint.written_dtype(name) for name in targets_of(source).weights.values()}
    if dtype is None and own[source.adapter.source_name(f"{EMBEDDING}.weight")] == torch.float32:
        dtype = torch.bfloat16
    return {} if dtype is None else {name: dtype for name, kind in own.items() if kind != dtype}

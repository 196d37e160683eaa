"""Computes λ, the factor of the noise map."""

from torch import Tensor

# Attribute names of a layer's λ vectors.
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def lam_from_vectors(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, *, init: float) -> Tensor:
    """Compute λ of a V1 layer: exp(λq1·λk1) - exp(λq2·λk2) + λ_init, a float32 scalar.

    Args:
        q1, k1, q2, k2: learned vectors [d].
        init: λ_init of the layer.

    Source: arXiv 2410.05258, equation 2.
    """
    return (q1.float() @ k1.float()).exp() - (q2.float() @ k2.float()).exp() + init

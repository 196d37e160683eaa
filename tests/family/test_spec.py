"""A `spec` that someone wrote by hand: what no specification has is refused by name, and nothing is guessed."""

import json

import pytest

from diffquant.errors import CheckpointError
from diffquant.family.spec import DiffSpec, read_spec
from tests.support.tables import in_one_test

V1 = DiffSpec(pairs=4, kv_pairs=2, head_dim=16, value_dim=32, lam="exp", post_norm="affine", scale_by_init=True)


def test_what_is_written_is_read_again():
    assert read_spec(json.loads(json.dumps(V1.to_dict()))) == V1
    assert read_spec(V1.to_dict() | {"soft_cap": None, "post_norm_eps": 0}).post_norm_eps == 0


@in_one_test(
    ("changes", "message"),
    [
        ({"rope": "interleave"}, "rope is 'interleave', not 'half' or 'interleaved' or 'none'"),
        ({"rope": None}, "rope is None"),
        ({"head_order": "paired"}, "head_order is 'paired', not 'adjacent' or 'halves'"),
        ({"scale_by_init": "no"}, "scale_by_init is 'no', not bool"),
        ({"shared_k": 1}, "shared_k is 1"),
        ({"maps": True}, "maps is True, not 1 or 2"),
        ({"pairs": 4.0}, "pairs is 4.0, not int"),
        ({"lam_init_offset": "1"}, "lam_init_offset is '1'"),
        ({"soft_cap": 30.0}, "soft_cap is not a known key"),
        ({"lambda": "exp", "post_norm": "rms"}, "lambda is not a known key; post_norm is 'rms'"),
    ],
)
def test_a_value_that_no_specification_has_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_spec(V1.to_dict() | changes)


def test_what_is_missing_is_named():
    with pytest.raises(CheckpointError, match=r"pairs is missing; value_dim is missing$"):
        read_spec({"kv_pairs": 2, "head_dim": 16})
    with pytest.raises(CheckpointError, match="not an object"):
        read_spec(["pairs"])

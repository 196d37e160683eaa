"""Every reader opens every folder that it claims, and decodes torch's tokens."""

import pytest

from tests.readers.readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_greedy_tokens_are_those_of_torch(folders, name):
    reader = READERS[name]
    if not reader.is_there:
        pytest.skip("needs what make test-all ONLY=readers installs")
    claimed = {feature: folder for feature, folder in folders.items() if reader.reads(folder)}
    _, answers = reader.answers(claimed)
    assert len(answers) >= 4
    assert not {feature: tokens for feature, tokens in answers.items() if tokens != claimed[feature].tokens}

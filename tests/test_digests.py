import hashlib

import pytest
import xxhash

from diffquant.support.digests import FileDigests, content_digest
from tests.support.tables import in_one_test


@pytest.fixture
def files(tmp_path):
    for name, size in (("a", 0), ("b", 5), ("c", 700_001)):
        (tmp_path / name).write_bytes(bytes(range(251)) * (size // 251) + b"!" * (size % 251))
    return sorted(tmp_path.iterdir())


def test_digests_are_xxhashs(files):
    expected = {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files}
    assert FileDigests.compute(files).to_dict() == {"xxh3_128": expected}
    assert content_digest(files[2]) == expected["c"]


def test_files_that_were_recorded_with_sha256_are_known_again(files, tmp_path):
    record = {"bytes": 1, "sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}}
    digests = FileDigests.read(record)
    assert digests.changed_files(tmp_path) == []
    assert digests == FileDigests.compute(files, digests.algorithm)
    files[0].write_bytes(b"\0")
    files[1].unlink()
    assert digests.changed_files(tmp_path) == ["a", "b"]


def test_files_under_other_names_have_the_same_contents(files, tmp_path):
    before = FileDigests.compute(files)
    renamed = [file.rename(tmp_path / f"model-{file.name}") for file in files]
    assert FileDigests.compute(renamed).digest_set == before.digest_set
    assert before.changed_files(tmp_path) == ["a", "b", "c"]


@in_one_test("entry", ["abc", {"a": 1}, None])
def test_a_record_whose_digests_are_none_is_refused(entry):
    with pytest.raises(TypeError, match="sha256 maps file names to digests"):
        FileDigests.read({"sha256": entry})

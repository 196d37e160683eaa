"""What is installed and run by name: constraints with and without hashes, actions of the workflow, what audits say."""

import re
from pathlib import Path

import pytest

from tests.audit import findings
from tests.hashes import HASHED, pins

ROOT = Path(__file__).parents[1]
# Of the extra quantizers, which CI's workflow does not install, and the one package from an index of its own.
_NOT_HASHED = {"auto-round", "bitsandbytes", "hqq", "torchao", "torch"}


def test_the_hashed_constraints_name_the_versions_of_the_others():
    plain, hashed = pins((ROOT / "constraints.txt").read_text()), pins(HASHED.read_text())
    assert {name: hashed.get(name) for name in plain if name not in _NOT_HASHED} == {
        name: version for name, version in plain.items() if name not in _NOT_HASHED
    }
    assert not hashed.keys() & _NOT_HASHED


def test_every_hashed_constraint_has_one_version_and_a_hash():
    lines = [line for line in HASHED.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert len(pins(HASHED.read_text())) == len(lines) > 200


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.name)
def test_actions_of_others_are_named_by_commit_with_their_tag(workflow):
    actions = re.findall(r"uses: (.+)", workflow.read_text())
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action) for action in actions)


def test_an_audit_tells_what_is_known_from_what_could_not_be_looked_up():
    report = {
        "dependencies": [
            {"name": "sound", "version": "1", "vulns": []},
            {"name": "holed", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]},
            {"name": "elsewhere", "skip_reason": "not found on PyPI"},
        ]
    }
    assert findings(report) == (["holed 2: CVE-1, fixed in 3"], ["elsewhere"], 2)

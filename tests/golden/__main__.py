"""Write goldens again: python -m tests.golden [NAME...], where graphs and help are names, too."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.golden.cases import CASES
from tests.golden.graphs import GRAPHS, KEPT, graph_text
from tests.golden.running import EXPECTED, expected, help_texts, run


def _write(names: list[str]) -> None:
    for case in CASES:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = run(case, Path(folder))
        file = expected(case)
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        print(f"{case.name}: exit {result['exit']}, {len(result['files'])} files", file=sys.stderr)
    if not names or "graphs" in names:
        shutil.rmtree(KEPT, ignore_errors=True)
        KEPT.mkdir()
        for name in GRAPHS:
            with tempfile.TemporaryDirectory() as folder:
                (KEPT / f"{name}.txt").write_text(graph_text(Path(folder), name))
    if not names or "help" in names:
        shutil.rmtree(EXPECTED / "help", ignore_errors=True)
        (EXPECTED / "help").mkdir(parents=True)
        for name, text in help_texts().items():
            (EXPECTED / "help" / f"{name}.txt").write_text(text)


_write(sys.argv[1:])

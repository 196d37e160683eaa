"""The rooms in which faults are planted, and the tests that should notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """Modules that are changed together with the tests that are asked about them.

    Attributes:
        modules: patterns of files, from the root of the repository.
        tests: files and folders of tests; those of them that reach a changed line are run.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def files(self) -> list[str]:
        return sorted({str(file) for pattern in self.modules for file in Path().glob(pattern)})


CHECKPOINT_TESTS = (
    "tests/checkpoint",
    "tests/llama_cpp",
    "tests/quantization",
    "tests/model/test_adapters.py",
    "tests/model/test_new_format.py",
    "tests/model/test_sizes.py",
    "tests/calib/test_statistics.py",
    "tests/calib/test_export_scales.py",
    "tests/test_hub.py",
    "tests/test_api.py",
)
GROUPS = {
    "numerics": Group(
        ("diffquant/numerics/*.py",),
        (
            "tests/numerics",
            "tests/attention/test_attention.py",
            "tests/checkpoint/test_codec.py",
            "tests/calib/test_observers.py",
            "tests/model/test_cache.py",
        ),
    ),
    "attention": Group(
        ("diffquant/attention/*.py", "diffquant/attention/backends/*.py"),
        ("tests/attention", "tests/family", "tests/model/test_diffllama.py", "tests/calib/test_observers.py"),
    ),
    "checkpoint": Group(
        ("diffquant/formats/*.py", "diffquant/source/*.py", "diffquant/quantization/**/*.py"), CHECKPOINT_TESTS
    ),
    "stats": Group(("diffquant/evals/stats.py",), ("tests/evals/test_stats.py",)),
}

"""The rooms in which faults are planted, and the tests that should notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """Modules that are changed together with the tests that are asked about them.

    Attributes:
        modules: patterns of files, from the root of the repository. Rooms at the top are reached through the links in
            diffquant/, by which their modules are called.
        tests: files and folders of tests, or tests in them; those of them that reach a changed line are run.
        sample: faults that are planted, unless the command line says how many.
        first: tests among them that are run for every fault, since no line tells that they read what it made.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    sample: int = 120
    first: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        return sorted({str(file) for pattern in self.modules for file in Path().glob(pattern)})


CHECKPOINT_TESTS = (
    "tests/checkpoint",
    "tests/llama_cpp",
    "tests/quantization",
    "tests/model/test_adapters.py",
    "tests/model/test_new_adapter.py",
    "tests/model/test_sizes.py",
    "tests/calib/test_statistics.py",
    "tests/calib/test_export_scales.py",
    "tests/test_hub.py",
    "tests/test_api.py",
)
GROUPS = {
    "numerics": Group(
        ("diffquant/numbers/**/*.py",),
        (
            "tests/numbers",
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
    "report": Group(
        ("diffquant/report/*.py",),
        (
            "tests/report/test_page.py",
            "tests/report/test_runs.py",
            "tests/report/test_sizes.py",
            "tests/report/test_tables.py",
            "tests/sweep/test_outputs.py",
            "tests/calib/test_search_report.py",
        ),
        40,
    ),
    "sweep": Group(
        (
            "diffquant/sweep/*.py",
            "diffquant/sweep/engines/*.py",
            "diffquant/evals/comparison.py",
            "diffquant/evals/samples.py",
        ),
        (
            "tests/sweep/test_claims.py",
            "tests/sweep/test_compare.py",
            "tests/sweep/test_engines.py",
            "tests/sweep/test_grid.py",
            "tests/sweep/test_outputs.py",
            "tests/sweep/test_run.py",
            "tests/test_devices.py::test_an_exported_folder_runs_where_its_runtime_can_and_checkpoints_on_the_device",
            "tests/test_own_files.py",
            "tests/golden/test_golden.py",
        ),
        40,
    ),
    "cache": Group(
        ("diffquant/model/*cache.py", "diffquant/model/graphed_steps.py"),
        (
            "tests/model/test_cache.py",
            "tests/model/test_fused_cache.py",
            "tests/model/test_generation_modes.py",
            "tests/model/test_graphed_steps.py",
            "tests/model/test_phi4flash.py",
        ),
        40,
    ),
    "calib": Group(
        (
            "diffquant/calib/*.py",
            "diffquant/calib/analysis/*.py",
            "diffquant/calib/calibration/*.py",
            "diffquant/calib/search/*.py",
        ),
        ("tests/calib",),
        40,
    ),
    "cli": Group(
        ("diffquant/cli/*.py", "diffquant/verbs/*.py"),
        (
            "tests/test_api.py",
            "tests/test_cli.py",
            "tests/test_cli_verbs.py",
            "tests/test_own_files.py",
            "tests/calib/test_calib_cli.py",
            "tests/checkpoint/test_any_model.py",
            "tests/evals/test_fidelity.py",
            "tests/quantization/test_default_rule.py",
            "tests/report/test_runs.py",
            "tests/golden/test_golden.py",
        ),
        40,
        ("tests/golden/test_golden.py::test_help_says_what_it_said",),
    ),
    "graph": Group(
        ("diffquant/export/graph/*.py",),
        (
            "tests/export/test_activations.py",
            "tests/export/test_bad_input.py",
            "tests/export/test_body.py",
            "tests/export/test_export.py",
            "tests/export/test_op.py",
            "tests/export/test_quantized_attention.py",
            "tests/export/test_web.py",
        ),
        40,
    ),
    "verification": Group(
        ("diffquant/export/verification/*.py",),
        # Sound exports of trained models and faulty kernels take longer than a trial.
        ("tests/export/test_planted_faults.py::test_a_planted_fault_is_refused", "tests/export/test_verification.py"),
        40,
    ),
}

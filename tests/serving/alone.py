"""What transformers makes of folders where diffquant cannot be imported; run as a program by the tests beside it."""

import json
import re
import sys
from pathlib import Path

sys.modules["diffquant"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, ContinuousBatchingConfig, GenerationConfig  # noqa: E402

torch.set_grad_enabled(False)
torch.set_num_threads(1)


def measured(folder: Path) -> dict[str, object]:
    """Largest differences from the logits in reference.pt, and whether tokens are those in it, by way of running."""
    kept = torch.load(folder / "reference.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    ids, mask = kept["ids"], kept["mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    found: dict[str, object] = {"class": type(model).__module__.rpartition(".")[2]}
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        whole = model(ids).logits - kept["logits"]
        padded = model(ids, attention_mask=mask, position_ids=positions).logits - kept["padded"]
        found[attention] = [whole.abs().max().item(), padded[mask.bool()].abs().max().item()]
    model.set_attn_implementation("sdpa")
    asked = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for cache in (None, "static"):
        tokens = model.generate(**asked, cache_implementation=cache)
        found[f"tokens {cache}"] = bool(torch.equal(tokens, kept["tokens"]))
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        model.save_pretrained(folder / "saved")
    return found


def batched(folder: Path) -> bool:
    """Whether continuous batching of prompts of several lengths gives the tokens that each gives alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    ids = torch.load(folder / "reference.pt")["ids"][1].tolist()
    prompts = [ids, ids[5:12], ids[:16]]
    asked = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default its cache takes most of the machine's memory.
    pages = ContinuousBatchingConfig(page_size=32, num_blocks=16, max_batch_tokens=64)
    answers = model.generate_batch(prompts, asked, continuous_batching_config=pages)
    together = [request.generated_tokens for request in answers.values()]
    # With a mask of its own: without one, a prompt's zeros would be taken for padding.
    alone = [
        model.generate(prompt, asked, attention_mask=torch.ones_like(prompt))[0, prompt.shape[1] :].tolist()
        for prompt in (torch.tensor([prompt]) for prompt in prompts)
    ]
    return together == alone


def open_as_the_card_says(folder: Path, **further: object) -> nn.Module:
    call = re.search(r"AutoModelForCausalLM\.from_pretrained\(path(, \w+=\w+)?\)", (folder / "README.md").read_text())
    asked = {"trust_remote_code": True} if call and "trust_remote_code=True" in call[0] else {}
    return AutoModelForCausalLM.from_pretrained(folder, **asked, **further).eval()


def as_the_card_says(folder: Path) -> dict[str, object]:
    """The dtype in which a folder opens as its card says, and the largest difference from reference.pt's logits.

    Weights are decoded by a first run in that dtype. Logits are then computed in float32, in which sums are exact.
    """
    model = open_as_the_card_says(folder)
    kept = torch.load(folder / "reference.pt")
    model(kept["ids"])
    return {
        "dtype": str(model.dtype),
        "furthest": (nn.Module.float(model)(kept["ids"]).logits - kept["logits"]).abs().max().item(),
    }


class Adapted(nn.Module):
    """A Linear beside a product of two small matrices, which alone are trained (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        # As peft makes them: like the weight, which has to be there.
        made_as = {"dtype": base.weight.dtype, "generator": torch.Generator().manual_seed(0)}
        self.base, self.down = base, nn.Parameter(torch.randn(4, base.in_features, **made_as) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def trained(folder: Path) -> dict[str, object]:
    """Losses before and after a step of adapters, by what was done before they were added; or why they were not."""
    ids, found = torch.load(folder / "reference.pt")["ids"], dict[str, object]()
    for what in ("nothing", "one forward", "run_compressed=False"):
        further = {"quantization_config": CompressedTensorsConfig(run_compressed=False)} if "=" in what else {}
        model = open_as_the_card_says(folder, **further)
        if what == "one forward":
            model(ids)
        model.requires_grad_(False)
        try:
            for layer in model.model.layers:
                layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
                layer.mlp.down_proj = Adapted(layer.mlp.down_proj)
        except AttributeError as error:
            found[what] = str(error)
            continue
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
        losses = []
        with torch.enable_grad():
            for _ in range(2):
                loss = model(ids, labels=ids).loss
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
        found[what] = losses
    return found


MEASURES = {each.__name__: each for each in (measured, batched, as_the_card_says, trained)}
results: dict[str, dict[str, object]] = {}
for word in sys.argv[1:]:
    if word.startswith("--"):
        results[measure := word.removeprefix("--")] = {}
    else:
        results[measure][word] = MEASURES[measure](Path(word))
print(json.dumps(results))

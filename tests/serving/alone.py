"""What transformers makes of folders where diffquant cannot be imported; run as a program by the tests beside it."""

import json
import sys
from pathlib import Path

sys.modules["diffquant"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig  # noqa: E402

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


measure = batched if sys.argv[1] == "batched" else measured
print(json.dumps({folder: measure(Path(folder)) for folder in sys.argv[2:]}))

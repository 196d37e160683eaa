"""The verb `serve`: serves a model with OpenAI's API, using vLLM."""

from pathlib import Path
from typing import Annotated, Literal

from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments
from diffquant.verbs.notes import print_output, say

Implementation = Annotated[Literal["plugin", "folder"], kinds.Kind(Literal["plugin", "folder"])]
Port = Annotated[int, kinds.Kind(int, "NUMBER", least=1, most=65535)]


@check_arguments
def serve(
    model: kinds.PathModel,
    *,
    host: kinds.Address = "127.0.0.1",
    port: Port = 8000,
    context: kinds.Context | None = None,
    cache: kinds.Name = "recipe",
    dtype: kinds.Name | None = None,
    tensor_parallel: kinds.Count = 1,
    implementation: Implementation = "plugin",
) -> None:
    """Serve a model to clients of OpenAI's API, using vLLM.

        diffquant serve model-4bit
        diffquant.serve("model-4bit", port=8001)

    The server runs until Ctrl-C. When it is ready, it prints its URL and a command line that requests a few tokens. By
    default only this machine can connect; set `host` to change that. If VLLM_API_KEY is set, clients must send that
    key.

    Args:
        model: see `quantize`.
        host: address to listen on.
        port: port to listen on.
        context: maximum number of tokens in a request and its answer; by default what model and memory allow.
        cache: format of the KV cache: recipe for the recipe's format, auto for the model's dtype, or a format of vLLM,
            such as fp8.
        dtype: dtype of the model; by default the checkpoint's, or bfloat16 if weights are packed.
        tensor_parallel: number of devices that share each layer.
        implementation: code that runs the model: plugin for diffquant's vLLM plugin, or folder for the modelling file
            in the folder.

    Raises:
        MissingDependencyError: vLLM is not installed, or does not find the plugin.
        UnknownModelTypeError: vLLM does not support the model.
        UsageError: the port is in use, a request of this context length does not fit into memory, or vLLM lacks the
            recipe's cache.
        CheckpointError: the folder cannot be opened, or contains code that is not diffquant's and would be executed.
        DiffQuantError: the server stopped unexpectedly.
    """
    import torch

    from diffquant.checkpoints.hub import fetch_to_local_path
    from diffquant.checkpoints.tokenizer import explain_tokenizer_difference
    from diffquant.serving.plan import plan_server
    from diffquant.serving.server import check_cpu, check_port, run_server
    from diffquant.support.machine import available_memory

    path, memory = Path(model), None if torch.cuda.is_available() else available_memory()
    plan = plan_server(
        path,
        host=host,
        port=port,
        context=context,
        cache=cache,
        dtype=dtype,
        ranks=tensor_parallel,
        implementation=implementation,
        memory=memory,
    )
    if memory is not None:
        check_cpu(path, plan.cache, implementation)
    check_port(host, port)

    def announce() -> None:
        if difference := explain_tokenizer_difference(fetch_to_local_path(path)):
            say(
                f"note: vLLM tokenizes with the tokenizer's class, not with tokenizer.json: {difference}; "
                "in tokenizer_config.json, set tokenizer_class to PreTrainedTokenizerFast"
            )
        print_output(f"{plan.url}\n{plan.curl}")

    run_server(plan, announce)

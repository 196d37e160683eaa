"""The verb `serve`: a model behind OpenAI's API, with vLLM."""

from pathlib import Path
from typing import Annotated, Literal

from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments
from diffquant.verbs.notes import say, show

Cache = Annotated[Literal["16", "fp8"], kinds.Kind(Literal["16", "fp8"])]
Implementation = Annotated[Literal["plugin", "folder"], kinds.Kind(Literal["plugin", "folder"])]
Address = Annotated[str, kinds.Kind(str, "ADDRESS")]
Port = Annotated[int, kinds.Kind(int, "NUMBER", least=1, most=65535)]
Context = Annotated[int, kinds.Kind(int, "TOKENS", least=1)]


@check_arguments
def serve(
    model: kinds.PathModel,
    *,
    host: Address = "127.0.0.1",
    port: Port = 8000,
    context: Context | None = None,
    cache: Cache = "16",
    dtype: kinds.Name | None = None,
    tensor_parallel: kinds.Count = 1,
    implementation: Implementation = "plugin",
) -> None:
    """Serve a model to any client of OpenAI's API, with vLLM.

        diffquant serve model-4bit
        diffquant.serve("model-4bit", port=8001)

    It runs until Ctrl-C. The URL and a command line that asks for a few tokens are printed once it answers. Only this
    machine can connect unless `host` says otherwise, and vLLM asks for a key where VLLM_API_KEY is set.

    Args:
        model: as `quantize` takes it.
        host: address to listen at.
        port: port to listen at.
        context: most tokens of a request, its answer included; by default what model and memory have room for.
        cache: width of keys and values in the cache; fp8 is vLLM's own. The recipe's own cache is diffquant's.
        dtype: dtype of the model; by default the checkpoint's, and bfloat16 where weights are packed.
        tensor_parallel: number of ranks that share each layer.
        implementation: what runs the model: diffquant's plugin, or the modelling file that the folder carries.

    Raises:
        MissingDependencyError: vLLM is not installed, or does not find the plugin.
        UnknownModelTypeError: vLLM has no layers for the model.
        UsageError: the port is taken, or a request of the context does not fit into the memory.
        CheckpointError: the folder cannot be opened, or holds code that is not diffquant's and that would run.
        DiffQuantError: the server ended by itself.
    """
    import torch

    from diffquant.checkpoints.hub import local_path
    from diffquant.checkpoints.tokenizer import class_difference
    from diffquant.serving.plan import plan_server
    from diffquant.serving.server import check_port, check_processor, run_server
    from diffquant.support.machine import free_memory

    path, memory = Path(model), None if torch.cuda.is_available() else free_memory()
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
        check_processor(path, cache, implementation)
    check_port(host, port)

    def announce() -> None:
        if difference := class_difference(local_path(path)):
            say(
                f"note: vLLM splits text by the tokenizer's class, not as tokenizer.json says: {difference}; "
                "in tokenizer_config.json, set tokenizer_class to PreTrainedTokenizerFast"
            )
        show(f"{plan.url}\n{plan.curl}")

    run_server(plan, announce)

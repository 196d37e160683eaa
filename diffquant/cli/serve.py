"""The command serve."""

from typing import Annotated, Literal

import typer

from diffquant.cli.app import verb
from diffquant.cli.options import Model, Revision, at_revision


@verb("serve model-4bit")
def serve(
    model: Model,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="NUMBER", help="Port to listen at.")] = 8000,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Most tokens of a request, its answer included; by default what model and memory have room for.",
        ),
    ] = None,
    cache: Annotated[
        Literal["16", "fp8"], typer.Option(help="Width of keys and values in the cache; fp8 is vLLM's own.")
    ] = "16",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Dtype of the model; by default the checkpoint's, and bfloat16 where weights are packed.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Number of ranks that share each layer.")
    ] = 1,
    implementation: Annotated[
        Literal["plugin", "folder"],
        typer.Option(help="What runs the model: diffquant's plugin, or the modelling file that the folder carries."),
    ] = "plugin",
    revision: Revision = None,
) -> None:
    """Serve a model to any client of OpenAI's API, with vLLM.

    It runs until Ctrl-C. The URL and a command line that asks for a few tokens are printed once it answers. Only this
    machine can connect unless --host says otherwise, and vLLM asks for a key where VLLM_API_KEY is set.
    """
    from diffquant.serve.server import serve as serve_model

    serve_model(
        at_revision(model, revision),
        host=host,
        port=port,
        context=context,
        cache=cache,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        implementation=implementation,
        ready=lambda plan: typer.echo(f"{plan.url}\n{plan.curl}"),
    )

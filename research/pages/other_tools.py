"""What other tools do with DIFF models, of the page on rounding weights."""

from research.pages.raw import raw
from research.pages.render import table
from research.studies.other_tools import SHOWN, table_cells

_REACHED = raw("other-tools.json")["rows"]
_BY_PLACE = {(each["tool"], each["model"]): each for each in _REACHED}
TOOLS = list(dict.fromkeys(each["tool"] for each in _REACHED))
_QUANTIZERS = [tool for tool in TOOLS if "Cache" not in tool and "onnx" not in tool]


def _reached(tool: str, model: str) -> str | None:
    reached: str | None = _BY_PLACE[tool, model]["reached"]
    return reached


TAKE_DIFFLLAMA = all(_reached(tool, "Llama") == _reached(tool, "DiffLlama") for tool in _QUANTIZERS)
TAKE_OUR_FOLDERS = all(
    _reached(tool, "Llama") == _reached(tool, f"{kind} in our folder") for tool in _QUANTIZERS for kind in ("V1", "V2")
)
REFUSE_UNILM = {each["reached"] for (_, model), each in _BY_PLACE.items() if "as unilm has it" in model} == {None}
CACHES_WORK = {_reached(tool, "DiffLlama") for tool in TOOLS if "Cache" in tool} == {"quantized"}
EXPORTER_WRITES = _reached("torch.onnx.export", "DiffLlama") == "written"


def tools_table() -> str:
    """What each tool reached with each model."""
    return table(["tool", *SHOWN], [[tool, *table_cells(_REACHED, tool)] for tool in TOOLS])

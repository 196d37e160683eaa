"""The verbs. Each is a Python function and a command: the command line is generated from its signature and docstring.

Importing this package is quick, because verbs import heavy modules only when they run.
"""

from diffquant.verbs.bench import bench as bench
from diffquant.verbs.calibrate import calibrate as calibrate
from diffquant.verbs.compare import compare as compare
from diffquant.verbs.convert import convert as convert
from diffquant.verbs.demo import demo as demo
from diffquant.verbs.doctor import doctor as doctor
from diffquant.verbs.evaluate import evaluate as evaluate
from diffquant.verbs.export import export as export
from diffquant.verbs.fidelity import fidelity as fidelity
from diffquant.verbs.generate import generate as generate
from diffquant.verbs.generate import run as run
from diffquant.verbs.inspect import inspect as inspect
from diffquant.verbs.inspect import plan as plan
from diffquant.verbs.outliers import outliers as outliers
from diffquant.verbs.quantize import quantize as quantize
from diffquant.verbs.report import report as report
from diffquant.verbs.search import search as search
from diffquant.verbs.serve import serve as serve
from diffquant.verbs.sweep import sweep as sweep
from diffquant.verbs.verify import verify as verify

# The help's headings and the verbs below each, in order.
GROUPS = {
    "Make": (quantize, convert, search, calibrate),
    "Measure": (evaluate, sweep, compare, fidelity, report, outliers, bench),
    "Run": (generate, serve, export, verify, run),
    "Set up": (inspect, plan, doctor, demo),
}

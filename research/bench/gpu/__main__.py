"""`python -m research.bench.gpu` measures the ratios a GPU must show."""

from research.bench.gpu.ratios import main

raise SystemExit(main())

"""`python -m diffquant.bench.gpu` measures the ratios a GPU must show."""

from diffquant.bench.gpu.ratios import main

raise SystemExit(main())

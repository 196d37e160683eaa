from diffquant.bench.gpu.ratios import main

raise SystemExit(main())

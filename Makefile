# Everything a developer or CI does here. Needs Go, make and git; the tests of the
# stores also need the packages redis-server and postgresql-15, which `make test`
# installs where it may. No containers, and no network but for modules and packages.

SHELL := /usr/bin/env bash
.DEFAULT_GOAL := help

# Never a cached result: go test does not see what a test builds and runs.
TESTFLAGS ?= -count=1 -timeout=60m
# Packages to test.
PKG ?= ./...
# What the whole is run on for its tests from outside, one after another.
STORES ?= bolt redis postgres
# What make images makes, such as manager; empty: all.
IMAGES ?=
# How many packages are tested at once, and as many with the race detector beside them; and how many
# processes share the tests from outside, each with a whole of its own: they mostly wait.
PACKAGES ?= 2
PROCESSES ?= 5
# Further flags of ginkgo for them, such as --focus.
E2EFLAGS ?=
# How often processes are killed by make drills on each of the stores that several gateways share.
KILLS ?= 100
# How many calls of a tool with few slots make drills admits on Redis. On PostgreSQL it is a tenth,
# since there each waits until the one before is on the disk. make test admits 50,000 on Redis and
# 5,000 on each other store.
ADMISSIONS ?= 1000000
# How often make drills makes each drill in a cluster.
N ?= 10
# The state directory of a cluster that runs (go run ./hack/cluster up), for the drills in a cluster; without it
# they make their own, and end it.
CLUSTER_DIR ?=
# How many intents make drills writes down in the cluster, and how many of them are held.
INTENTS ?= 20000
HELD ?= 1000
# Tested with the race detector, where there is a C compiler for it: the stores only so, the guard
# once more and with a shorter simulation.
RACE_ONLY ?= /internal/store(/|$$)
RACE_TOO ?= /internal/guard$$

.PHONY: help
help: ## Say what there is.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Tell the story: a payment that is retried, held, cleared and survives a crash.
	@echo "demo: building what is not built yet (the first time about ten minutes), then the story"
	@go run ./hack/demo

.PHONY: up
up: ## Start all of it in the background; .dev/env has what scripts need.
	@echo "up: building what is not built yet (the first time about ten minutes), then starting all of it"
	@go run ./hack/dev up

.PHONY: down
down: ## End what `make up` started, and remove its data.
	@go run ./hack/dev down

.PHONY: build
build: ## Build the manager and the test provider into bin/.
	go build -buildvcs=false -o bin/ ./cmd/manager ./test/provider/cmd/provider

.PHONY: images
images: ## Make the container images into dist/images, without Docker; redis and postgres, for tests, need Debian's apt.
	@go run ./hack/images -o dist/images $(IMAGES)

# The image that is installed; empty: holdfast-dev/manager:dev, as `make images` makes it.
IMG ?=
export IMG

.PHONY: deploy
deploy: ## Install Holdfast into the cluster of your kubectl, and wait until it serves; IMG= names the image.
	@hack/install.sh deploy

.PHONY: undeploy
undeploy: ## Take away what `make deploy` installed, but the kinds, their objects and what is remembered; ALL=1: these too.
	@ALL=$(ALL) hack/install.sh undeploy

.PHONY: build-installer
build-installer: ## Write all that is installed into one file, dist/install.yaml; IMG= names the image.
	@mkdir -p dist
	@hack/install.sh render > dist/install.yaml.partial
	@mv dist/install.yaml.partial dist/install.yaml
	@echo "build-installer: kubectl apply --server-side -f dist/install.yaml"

.PHONY: generate
generate: bin/controller-gen bin/crd-ref-docs ## Generate code, CRDs and docs/api.md from the types in api/, the table of metrics, and Argo CD's ConfigMap.
	bin/controller-gen object crd applyconfiguration paths=./api/v1alpha1 output:crd:artifacts:config=config/crd/bases
	bin/crd-ref-docs --source-path=./api/v1alpha1 --config=hack/tools/reference/config.yaml --templates-dir=hack/tools/reference --renderer=markdown --log-level=ERROR --output-path=docs/api.md
	go run ./hack/metricsdoc docs/metrics.md
	go run ./hack/argocd config/argocd

.PHONY: lint
lint: ## Run the linters.
	hack/golangci-lint.sh run ./...

.PHONY: verify
verify: generate lint ## Check that generated files are up to date, lint, and that nothing is left uncommitted.
	git diff --exit-code
	@untracked=$$(git ls-files --others --exclude-standard); \
	if [[ -n $$untracked ]]; then echo "verify: not committed:"; echo "$$untracked"; exit 1; fi
	@echo "verify: generated files are up to date, no findings"

.PHONY: assets
assets: ## Make sure that the programs of a control plane are here; a first build takes about ten minutes.
	@go run ./hack/controlplane assets

# Compilers and tests collect less garbage on the way: a fifth less work.
go = GOGC=400 go

# What vet would say, make lint says.
go_test = KUBEBUILDER_ASSETS=$$(go run ./hack/controlplane assets) $(go) test $(TESTFLAGS) -vet=off -p=$(PACKAGES)

# What is not to be tested without the race detector.
not_plain = $(if $(filter 1,$(shell go env CGO_ENABLED)),$(RACE_ONLY),^$$)

.PHONY: test-plain
test-plain:
	@set -euo pipefail; \
	all=$$(go list $(PKG)); packages=$$(grep -vE '/test/e2e|$(not_plain)' <<<"$$all" || true); \
	if [[ -n $$packages ]]; then $(go_test) $$packages; fi

.PHONY: test-race
test-race:
	@set -euo pipefail; \
	all=$$(go list $(PKG)); packages=$$(grep -E '$(RACE_ONLY)|$(RACE_TOO)' <<<"$$all" || true); \
	if [[ $$(go env CGO_ENABLED) != 1 ]]; then echo "test: no C compiler, so no race detector"; \
	elif [[ -n $$packages ]]; then $(go_test) -race -short $$packages; fi

# The directory of the tests from outside; "" if they are not to run.
outside = all=$$(go list -f '{{.Dir}}' $(PKG)); outside=$$(grep '/test/e2e$$' <<<"$$all" || true)

# The modules of their own, and what the tests from outside are: beside the others, which do not keep
# the machine busy to their end.
.PHONY: test-beside
test-beside:
	@set -euo pipefail; $(outside); \
	if [[ "$(PKG)" == ./... ]]; then \
		for module in test/prometheus test/gitops hack/images/maker; do $(go) test -C "$$module" -mod=readonly $(TESTFLAGS) -p=1 ./...; done; \
	fi; \
	if [[ -n $$outside ]]; then \
		$(go) build -buildvcs=false -o bin/ ./cmd/manager ./test/provider/cmd/provider; \
		$(go) run -mod=readonly github.com/onsi/ginkgo/v2/ginkgo build $$outside; \
	fi

.PHONY: test
test: ## Run all tests, those against a real API server and from outside included.
	@hack/servers.sh
	@echo "test: making sure that the control plane is here"
	@go run ./hack/controlplane assets >/dev/null
	@echo "test: running the tests, beside them those with the race detector, the alert rules and the dashboard on Prometheus' own engine,"
	@echo "test: what Argo CD, Flux and kstatus make of the kinds, and the program that makes the images; a package says ok when it is done"
	@$(MAKE) --no-print-directory -j3 test-plain test-race test-beside
	@set -euo pipefail; $(outside); \
	export KUBEBUILDER_ASSETS=$$(go run ./hack/controlplane assets); \
	if [[ -n $$outside ]]; then \
		for store in $(STORES); do \
			echo "test: running the whole on $$store and its tests from outside, about five minutes"; \
			HOLDFAST_E2E_STORE=$$store go run -mod=readonly github.com/onsi/ginkgo/v2/ginkgo --procs=$(PROCESSES) --timeout=60m $(E2EFLAGS) $$outside/e2e.test; \
		done; \
	fi

.PHONY: bench
bench: ## Measure the guard on each store beside a plain proxy and the stores' floors; bench/results.json has it all.
	@hack/servers.sh
	@go run ./bench

.PHONY: picture
picture: ## Draw docs/dashboard.svg from a run of five minutes, with agents that behave badly.
	@go run ./hack/picture

# The tests in a cluster. They need root, and bring it up themselves.
in_cluster = HOLDFAST_CLUSTER=$(abspath $(CLUSTER_DIR)) go run -mod=readonly github.com/onsi/ginkgo/v2/ginkgo $(E2EFLAGS)

.PHONY: test-e2e
test-e2e: ## Install Holdfast in a cluster of two nodes, with its stores, the provider and agents as pods, and break it: each drill once. As root.
	@hack/packages.sh
	@echo "test-e2e: the cluster itself: nodes that crash and come back, and links that are cut; the images are made meanwhile"
	@set -euo pipefail; \
	images=$$(mktemp -d); made=; \
	trap 'if [[ -n $$made ]]; then kill -- -$$made 2>/dev/null || true; wait $$made 2>/dev/null || true; fi; rm -rf "$$images"' EXIT; \
	set -m; { nice go run ./hack/images -o "$$images" && nice go run -mod=readonly github.com/onsi/ginkgo/v2/ginkgo build ./test/e2e/cluster; } >/dev/null & made=$$!; set +m; \
	go test $(TESTFLAGS) -tags=cluster ./hack/cluster/nodes; \
	wait $$made; made=; \
	echo "test-e2e: Holdfast in a cluster of two nodes, and its drills"; \
	HOLDFAST_IMAGES=$$images $(in_cluster) --timeout=40m ./test/e2e/cluster/cluster.test

.PHONY: drills
drills: drills-cluster drills-processes ## Make all drills: those in a cluster N times, and those of processes. It takes hours.

.PHONY: drills-cluster
drills-cluster: ## Break a cluster in every way that test-e2e does, N times each; bin/drills.md has what callers saw. As root.
	@hack/packages.sh
	@HOLDFAST_DRILLS=$(N) $(in_cluster) --timeout=12h --label-filter=drill ./test/e2e/cluster

.PHONY: drills-processes
drills-processes: ## Kill gateways and stores under load, 200 times, admit a million calls to 64 slots (on PostgreSQL 100,000), and count the money.
	@hack/servers.sh
	@set -euo pipefail; \
	export KUBEBUILDER_ASSETS=$$(go run ./hack/controlplane assets); \
	for store in redis postgres; do \
		admissions=$(ADMISSIONS); if [[ $$store == postgres ]]; then admissions=$$((admissions / 10)); fi; \
		echo "drills: $(KILLS) kills of gateways and of $$store, $$admissions admissions"; \
		HOLDFAST_E2E_STORE=$$store HOLDFAST_E2E_KILLS=$(KILLS) HOLDFAST_E2E_ADMISSIONS=$$admissions HOLDFAST_E2E_INTENTS=$(INTENTS) HOLDFAST_E2E_HELD=$(HELD) go test $(TESTFLAGS) -timeout=5h -v ./test/e2e -run '^TestEndToEnd$$' -ginkgo.label-filter=drill; \
	done

.PHONY: clean
clean: down ## End what runs and remove what was built here; caches stay.
	rm -rf bin

bin/controller-gen: hack/tools/go.mod hack/tools/go.sum
	go build -C hack/tools -mod=readonly -buildvcs=false -o $(CURDIR)/$@ sigs.k8s.io/controller-tools/cmd/controller-gen

bin/crd-ref-docs: hack/tools/go.mod hack/tools/go.sum
	go build -C hack/tools -mod=readonly -buildvcs=false -o $(CURDIR)/$@ github.com/elastic/crd-ref-docs

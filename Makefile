# sandbox-agent: build, demo, tests. `make help` lists what there is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
MODULE := github.com/sandbox-agent/sandbox-agent
# The version is given by hand, not by Go's VCS stamp: that one fails in a checkout of another owner, and it makes
# the test cache useless.
export GOFLAGS := $(GOFLAGS) -buildvcs=false
# Never download another toolchain behind the user's back: scripts/setup.sh says which one is needed.
export GOTOOLCHAIN := local

REPO ?= $(CURDIR)
BIN ?= bin
FUZZTIME ?= 20s

.PHONY: help setup build demo test test-long test-kernel test-kernel-all test-kata test-kata-vm test-kube test-git runtimes kube image bench lint generate generate-check fuzz clean FORCE

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what the build needs (Debian packages; says so when Go is too old)
	@scripts/setup.sh build

build: setup $(BIN)/sandbox-agent $(BIN)/receiptd $(BIN)/pid1 $(BIN)/sandbox-agent-selftest ## bin/sandbox-agent, bin/receiptd, bin/pid1, bin/sandbox-agent-selftest

# The agent has libcontainer in process, whose nsenter is C and runs before the Go runtime: cgo.
$(BIN)/sandbox-agent: FORCE
	CGO_ENABLED=1 go build -trimpath -ldflags "-s -w -X $(MODULE)/internal/cli.Version=$(VERSION)" -o $@ ./cmd/sandbox-agent

# What runs inside a sandbox is static: receiptd and pid1, which are small, and the self-test's attacker.
$(BIN)/receiptd $(BIN)/pid1 $(BIN)/sandbox-agent-selftest: FORCE
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o $@ ./cmd/$(@F)

# Root is asked for before anything is built.
demo: ## run through it on a real repository: make demo [REPO=/path/to/a/clone]
	@scripts/need-root.sh "make demo"
	@$(MAKE) --no-print-directory build
	@$(BIN)/sandbox-agent demo --repo "$(REPO)"

test: ## all tests, as root, and go vet
	@scripts/need-root.sh "make test"
	@scripts/setup.sh build test
	@scripts/test.sh

test-long: ## the tests five times over, to find what only fails sometimes, whole suites over runc, 200 sandboxes up and down, and each parser fuzzed for a minute
	@scripts/need-root.sh "make test-long"
	@scripts/setup.sh build test
	@scripts/test.sh -count=5
	@SANDBOX_TEST_LONG=1 go test ./tests/faults ./internal/agent/journal -v -timeout 6h
	@SANDBOX_TEST_LONG=1 go test ./internal/runtime/containerd ./tests/network -run ^TestMany -count=1 -v -timeout 2h
	@SANDBOX_TEST_LONG=1 go test ./tests/runtimes -count=1 -v -timeout 3h
	@scripts/fuzz.sh 60s

test-kernel: ## promises and attacks on Linux 5.10 to the newest, in emulated guests (KERNELS="6.1 6.12", KERNEL=vmlinuz MODULES=lib/modules/VERSION for one's own; KERNELFLAGS: see tests/kernel)
	@scripts/need-root.sh "make test-kernel"
	@scripts/setup.sh build kernel
	@$(if $(KERNEL),true,scripts/kernels.sh)
	@KERNEL="$(abspath $(KERNEL))" MODULES="$(abspath $(MODULES))" go test ./tests/kernel -run TestKernels -count=1 -v -timeout 3h $(if $(KERNEL),-own,-kernels "$(KERNELS)") $(KERNELFLAGS)

test-kernel-all: ## all kernels (also 6.18, generic, rt), and every variation on each; writes docs/kernels.md (KERNELFLAGS=-full: whole suites, for hours)
	@scripts/need-root.sh "make test-kernel-all"
	@scripts/setup.sh build kernel
	@scripts/kernels.sh --set all
	@go test ./tests/kernel -run TestKernels -count=1 -v -timeout 12h -all -write -kernels "$(KERNELS)" $(KERNELFLAGS)

test-kata: ## sandboxes in Kata's virtual machines, on a node with KVM and Kata Containers (elsewhere: skipped, with the reason)
	@scripts/need-root.sh "make test-kata"
	@scripts/setup.sh build test runtimes
	@scripts/containerd.sh containerd runc >/dev/null
	@go test ./tests/kata/vm -count=1 -v -timeout 20m

test-kata-vm: ## the same on an emulated node, with the tests' own shim in the place of Kata's, and runc's sandboxes on cgroup v2 (KATAFLAGS: see tests/kata/nested)
	@scripts/need-root.sh "make test-kata-vm"
	@scripts/setup.sh build kernel runtimes
	@scripts/kernels.sh
	@scripts/containerd.sh containerd runc >/dev/null
	@SANDBOX_MUST_RUN=1 SANDBOX_TEST_KATA_VM=1 go test ./tests/kata/nested -count=1 -v -timeout 60m $(KATAFLAGS)

test-kube: ## daemonset/ on a Kubernetes node from nothing, with new images, or those of make image (IMAGES=bin/images)
	@scripts/need-root.sh "make test-kube"
	@scripts/setup.sh build test kube image runtimes
	@scripts/containerd.sh containerd runc cni gvisor >/dev/null
	@scripts/kube.sh >/dev/null
	@SANDBOX_MUST_RUN=1 SANDBOX_TEST_IMAGES="$(abspath $(IMAGES))" go test ./tests/e2e/kube -count=1 -v -timeout 30m

test-git: ## everything that asks Git, with Debian's 2.47 and newer in the place of the machine's (GITS="trixie sid", TESTFLAGS)
	@scripts/need-root.sh "make test-git"
	@scripts/setup.sh build test
	@scripts/test-git.sh $(TESTFLAGS)

runtimes: ## build the containerd, runc, CNI plugins and gVisor that tests start (once; without them these tests are skipped)
	@scripts/setup.sh build runtimes
	@scripts/containerd.sh

kube: ## build the Kubernetes that tests/e2e/kube starts (once, 6 minutes; without it these tests are skipped)
	@scripts/setup.sh build kube
	@scripts/kube.sh

image: ## the images of the sandbox and of the agent, without Docker: bin/images, and each tool run in a sandbox (docs/images.md)
	@scripts/need-root.sh "make image"
	@scripts/setup.sh build image
	@scripts/image.sh -o $(BIN)/images

bench: ## measure against bare bash, the durable floor, bwrap, runc and crun (BENCHFLAGS: see go run ./bench -h)
	@scripts/need-root.sh "make bench"
	@$(MAKE) --no-print-directory build
	@scripts/setup.sh build test
	@go run ./bench -bin $(BIN) $(BENCHFLAGS)

lint: ## gofmt, golangci-lint, govulncheck, shellcheck, import rules
	@scripts/setup.sh build lint
	@scripts/lint.sh

generate: ## generate the code of the protos and the seccomp filters
	@scripts/setup.sh build generate
	@scripts/generate.sh

generate-check: ## fail when committed generated code is not what generate makes
	@scripts/setup.sh build generate
	@scripts/generate.sh --check

fuzz: ## fuzz each parser for FUZZTIME (20s)
	@scripts/fuzz.sh "$(FUZZTIME)"

clean: ## remove bin/
	rm -rf bin

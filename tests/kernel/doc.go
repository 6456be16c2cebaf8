// Package kernel tests this module on other Linux versions than that of the machine, and on cgroup v2 whatever the machine
// has. Each kernel of internal/testkit/vm/kernels.txt (scripts/kernels.sh fetches them) boots under qemu's software emulation
// with a root file system made of the machine's own programs, Git included, and the product's own. What ran inside comes back
// as ordinary test output: one subtest for each kernel, below it "suites" (the packages' own test programs, test by test) and
// "variations" (a node on which something is switched off: what "sandbox-agent check" says of it, and what then really happens).
//
//	go test ./tests/kernel                               the part of every run, on the kernels of every run
//	go test ./tests/kernel -all                          that on all kernels, and every variation on each (make test-kernel-all)
//	go test ./tests/kernel -full                         the same with whole suites, which takes hours
//	go test ./tests/kernel -kernels "6.1 newest-rt"      some of them
//	KERNEL=vmlinuz MODULES=lib/modules/VERSION go test ./tests/kernel -own    one's own
//
// A kernel that is not in the cache is a skip, and a failure where tests must run (SANDBOX_MUST_RUN). matrix_test.go is the
// data: what runs where, which skips are in order, and what is expected of each variation. With -write the run writes
// docs/kernels.md. Nothing imports this package.
package kernel

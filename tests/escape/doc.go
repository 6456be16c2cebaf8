// Package escape attacks the product from inside a sandbox, over its public API: a real agent, a real repository, the
// real kernel. Each numbered hole of the facts that the design stands on is a test TestHoleN..., each promise one
// TestPN.... Where it can be shown, a test first shows that the attack works where there is no defence.
//
// What an operator's self-test attacks as well is a row of the table in internal/attack, and run from there (selftest_test.go).
//
// Nothing is imported from here. What the tests attack is this machine's own sandbox and nothing else.
package escape

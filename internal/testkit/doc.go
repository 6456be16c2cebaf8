// Package testkit is what the project's tests share: saying what a test needs of the machine, building the two
// inside binaries, short-lived folders, a real Git repository, and a check that nothing is left behind.
//
// Only tests import it. A test that the machine can't run is skipped with the reason; with SANDBOX_MUST_RUN=1 (CI)
// it fails instead, so that a missing prerequisite never looks like a pass.
package testkit

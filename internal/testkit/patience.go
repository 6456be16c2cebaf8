package testkit

import (
	"os"
	"time"
)

// Patience is how long a test waits for something that never comes: a minute, or what SANDBOX_TEST_PATIENCE says ("10m") where all
// that is waited for takes longer. Nothing passes or fails by it.
func Patience() time.Duration {
	if d, err := time.ParseDuration(os.Getenv("SANDBOX_TEST_PATIENCE")); err == nil {
		return d
	}
	return time.Minute
}

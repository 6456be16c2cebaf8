//go:build !amd64

package inside

import "fmt"

// foreign has nothing to try on a machine without i386 and x32.
func foreign(a *attacker, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("name one call")
	}
	a.tried++
	return nil
}

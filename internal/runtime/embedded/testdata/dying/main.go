// Command dying stands in for a receiptd that ends with a message before it is ready.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "receiptd: cannot go on")
	os.Exit(1)
}

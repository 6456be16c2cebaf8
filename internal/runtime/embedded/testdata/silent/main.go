// Command silent stands in for a receiptd that never gets ready.
package main

import "time"

func main() { time.Sleep(time.Hour) }

// Command pid1 is PID 1 of one command's PID namespace; see package pid1. receiptd starts it.
package main

import "github.com/sandbox-agent/sandbox-agent/pkg/nsexec/pid1"

func main() { pid1.Main() }

// Package receiptd is the trusted process inside a sandbox: the container's init. It launches each command in fresh
// namespaces, waits for its boundary, and writes its receipt where no command can see it.
//
// It may import pkg/nsexec, pkg/receipt, the generated inside API, ttrpc, x/sys/unix and the standard library, and
// nothing else; cmd/receiptd imports it. It keeps P2 (the receipt is written before the answer), P3 (with pkg/nsexec),
// P4 (one command at a time), P6 (attach epochs), P9 and P13.
package receiptd

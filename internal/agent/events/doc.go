// Package events is the chain of what happened on a node: to its sessions, their sandboxes and their commands.
//
// An event is written in the same step of the journal as what it tells of. So it costs no sync of its own, is lost only
// together with that, and never tells of something that did not happen. The journal numbers events in the order in
// which it made them durable or visible; that number is the cursor, by which a reader goes on where it was. Readers
// read from the journal and are never waited for: one that falls behind events.keep is told so.
//
// A crash of the agent or the node may take events that were not synced yet, with what they told of. Then the next
// start says so with a "gap" event, and what it finds out again (a result, from its receipt) is told again.
//
// The audit log (audit.go) is one of the readers. No event holds a command's output, environment, labels or grants, nor
// its text, unless audit.commands is set; and then only the audit log shows it.
//
// Only internal/agent imports it.
package events

// Package journal is what the agent remembers: a small ordered key-value store on disk, in which a change is durable
// when Update returns.
//
// It keeps the storing half of promises P1 (an intent is on disk before anything starts), P6 (after a crash at any
// point the record says what may have run) and P7 (ids stay known). It is built on Pebble, which won the measurement
// in bench/journal, and adds what Pebble leaves open:
//
//   - What was promised is proved at Open. Every change also writes a running checksum over all live records, so that
//     a lost or changed one shows, whichever file it was in (Pebble itself takes a broken record of its MANIFEST for
//     the file's end); and a sequence number, of which the last synced one is noted in a file beside the store, so
//     that a lost end shows as well. A torn end that was never promised is dropped silently.
//   - A failed sync is final ("fsyncgate": after a failed fsync the kernel may have dropped the pages, and a second one
//     succeeds without having written them). Pebble ends the process then; here the journal refuses every later change
//     with ErrPoisoned and goes on answering reads.
//   - Changes that arrive at the same time share one sync.
//
// It knows nothing of sessions or execs. Only internal/agent imports it.
package journal

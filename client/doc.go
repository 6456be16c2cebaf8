// Package client is how a control plane talks to one sandbox-agent: sessions, commands, their output as it comes,
// events, trusted Git. It is this module's public Go API, and imports only the generated API and the receipt's two
// packages. Promises P6 and P7 (nothing is run twice) and P2 (an answer rests on a receipt that verifies) are kept on
// the caller's side by it.
//
//	c := client.New("/run/sandbox-agent/exec.sock", client.Options{})
//	s, err := c.CreateSession(ctx, &sandboxv1.CreateSessionRequest{
//		SessionId: "job-17", Workspace: &sandboxv1.Workspace{Repository: "/srv/project", Branch: "job-17"}})
//	…
//	res, err := c.Exec(ctx, &sandboxv1.ExecRequest{SessionId: "job-17", ExecId: "step-1", Command: "go test ./..."})
//	switch {
//	case errors.Is(err, client.ErrNotStarted): // it certainly never ran
//	case errors.Is(err, client.ErrUncertain):  // it may have run: look before you repeat it
//	default:                                   // it ran, res says how it ended, and its receipt verifies
//	}
//
// A whole program is examples/go; docs/client.md tells what to store, and when.
//
// # Asking again
//
// Exec, Stream, CancelExec, CreateSession and WatchEvents ask again by themselves when the connection is lost or the
// agent is being restarted, for Options.RetryFor, always with the same id and the same request: the agent answers a known
// id from its record. An exec id that the caller left empty is made before anything is sent. A caller that may itself be
// restarted chooses the ids, stores them before it calls, and calls again with them.
//
// Nothing else is asked again: ClaimSession, RetireSandbox, UpdateGrants, DeleteSession, DeleteWorkspace, Git and Harvest
// fail with ErrConnectionLost, and the caller looks (GetSession) before it decides.
//
// NOT_STARTED is an answer, and recorded: its exec id says so ever after. To run the command all the same, a caller
// takes a new id. Nobody does that for it.
//
// # What is verified
//
// A sandbox signs each receipt with a key of its own. The client pins the public half (Options.Keys) from the session's
// record, at the first sight of the sandbox: when CreateSession, GetSession or another call answers with the session.
// From then on the key of that sandbox, its session and its generation must stay what they were (ErrKeyChanged), also
// when the agent says otherwise. An answer of Exec, Stream, CancelExec or GetExec is given only if its receipt verifies
// with the pinned key, is of this session, exec, sandbox and generation, of this request (its digest; CancelExec and
// GetExec don't know the request: compare Result.Verified.RequestDigest with RequestDigest), and if every field that the
// receipt holds too, the kept output included, is the receipt's. Otherwise the error is ErrUnverified. The nonce is the
// agent's, made for this one start: the client compares it with the one that the agent recorded with its intent, where the
// answer has that.
//
// No receipt stands behind: Harvest, RefusedDestinations, Network, Evidence, Reason, OutputInfo.File, NOT_STARTED, UNCERTAIN, and CANCELLED where
// the sandbox had to be stopped under the command. These are the agent's word. CANCELLED is taken only with a receipt or
// the complete evidence.
//
// Where a key was read from the very answer's agent just now, as for a sandbox that was started for this command, the
// signature proves that answer and session record belong together, and that neither changes later. Who wants more fences
// on the generation (ExecRequest.Generation) of a session whose key was pinned before.
//
// # Errors
//
// Every error of a call is an *Error or wraps one where an agent answered; errors.Is tells its Connect code
// (ErrNotFound, ErrFailedPrecondition, …), ErrNoAgent and ErrConnectionLost. An error of Exec and Stream is an
// *ExecError, and is exactly one of ErrNotStarted and ErrUncertain.
//
// Times are absolute with nanoseconds, sizes and offsets are bytes, digests are SHA-256 in lower-case hex. A Client may
// be used by any number of goroutines. The output of commands, names in their Git work and everything else that they
// wrote is untrusted data.
package client

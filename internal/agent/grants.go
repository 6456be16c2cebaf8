package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"maps"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/metrics"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime"
)

// Bounds of a session's grants (P16). Paths and contents of files, and variables, count.
const (
	maxGrants      = 32
	maxGrantFiles  = 64
	maxGrantBytes  = 1 << 20
	maxGrantPath   = 1024
	maxGrantFolder = 255 // NAME_MAX
)

const grantText = "abcdefghijklmnopqrstuvwxyz-" + digits

// grantSet is all of a session's grants, with their contents. It lives in the agent's memory and in that of the
// sandbox's file system, and nowhere else: it is never encoded, logged or shown.
type grantSet struct {
	names  []grantRecord
	files  []runtime.Grant
	env    map[string]string
	digest string  // lower-case hex; empty without a grant
	given  instant // when the session got it
}

// grantRecord is what the journal has of a grant.
type grantRecord struct {
	Name      string    `json:"name"`
	ExpiresAt time.Time `json:"expiresAt,omitzero"`
}

// newGrantSet checks grants and puts them into their canonical order. Errors never hold a content or a value.
func newGrantSet(list []*sandboxv1.Grant, allowEnv []string) (*grantSet, error) {
	if len(list) > maxGrants {
		return nil, invalid("grants: %d of them, at most %d", len(list), maxGrants)
	}
	set := &grantSet{env: map[string]string{}}
	size := 0
	for _, g := range slices.SortedFunc(slices.Values(list), func(a, b *sandboxv1.Grant) int { return cmp.Compare(a.GetName(), b.GetName()) }) {
		n, err := set.add(g)
		if err != nil {
			return nil, err
		}
		size += n
	}
	if size > maxGrantBytes {
		return nil, invalid("grants: %d bytes in all, at most %d", size, maxGrantBytes)
	}
	if err := checkEnv(set.env, allowEnv); err != nil {
		return nil, fmt.Errorf("%w (in grants)", err)
	}
	set.digest = digestOf(set, list)
	return set, nil
}

func (set *grantSet) add(g *sandboxv1.Grant) (size int, err error) {
	name := g.GetName()
	switch {
	case !madeOf(name, grantText, 63):
		return 0, invalid("grants: name %q: use 1 to 63 of a-z 0-9 -", name)
	case len(set.names) > 0 && set.names[len(set.names)-1].Name == name:
		return 0, invalid("grants: %q stands there twice", name)
	}
	rec := grantRecord{Name: name}
	if g.GetExpiresAt() != nil {
		if err := g.GetExpiresAt().CheckValid(); err != nil {
			return 0, invalid("grants: expires_at of %q is no time: %v", name, err)
		}
		rec.ExpiresAt = g.GetExpiresAt().AsTime()
	}
	files, size, err := grantFiles(g)
	if err != nil {
		return 0, err
	}
	for k, v := range g.GetEnv() {
		if _, taken := set.env[k]; taken {
			return 0, invalid("grants: env %q of %q is set by another grant too: leave one out", k, name)
		}
		set.env[k] = v
		size += len(k) + len(v)
	}
	set.names = append(set.names, rec)
	set.files = append(set.files, runtime.Grant{Name: name, Files: files})
	return size, nil
}

// grantFiles gives the files in the order of their paths.
func grantFiles(g *sandboxv1.Grant) (files []runtime.GrantFile, size int, err error) {
	if len(g.GetFiles()) > maxGrantFiles {
		return nil, 0, invalid("grants: %q has %d files, at most %d", g.GetName(), len(g.GetFiles()), maxGrantFiles)
	}
	folders, names := map[string]bool{}, map[string]bool{}
	for _, f := range g.GetFiles() {
		p := f.GetPath()
		if err := checkGrantPath(p); err != nil {
			return nil, 0, invalid("grants: path %q in %q: give %v", p, g.GetName(), err)
		}
		if names[p] {
			return nil, 0, invalid("grants: path %q stands twice in %q", p, g.GetName())
		}
		names[p] = true
		for dir := path.Dir(p); dir != "."; dir = path.Dir(dir) {
			folders[dir] = true
		}
		files = append(files, runtime.GrantFile{Path: p, Content: f.GetContent()})
		size += len(p) + len(f.GetContent())
	}
	for p := range names {
		if folders[p] {
			return nil, 0, invalid("grants: path %q in %q is a file and a folder", p, g.GetName())
		}
	}
	slices.SortFunc(files, func(a, b runtime.GrantFile) int { return cmp.Compare(a.Path, b.Path) })
	return files, size, nil
}

// checkGrantPath says what a path must be, if it is not; its error is that sentence.
func checkGrantPath(p string) error {
	for part := range strings.SplitSeq(p, "/") {
		if part == "" || part == "." || part == ".." || len(part) > maxGrantFolder {
			return fmt.Errorf("a clean path relative to the grant's folder, without \"..\", for example \"config\", of names of at most %d bytes", maxGrantFolder)
		}
	}
	if len(p) > maxGrantPath || strings.ContainsFunc(p, unicode.IsControl) || !utf8.ValidString(p) {
		return fmt.Errorf("at most %d bytes of UTF-8 without control characters", maxGrantPath)
	}
	return nil
}

// digestOf is the SHA-256 of a canonical form: every text and number is preceded by its length or is of fixed size, so
// that no two sets have the same form. A digest tells nothing of random secrets; a guess of a short one can be checked
// against it.
func digestOf(set *grantSet, list []*sandboxv1.Grant) string {
	if len(list) == 0 {
		return ""
	}
	env := map[string]map[string]string{}
	for _, g := range list {
		env[g.GetName()] = g.GetEnv()
	}
	d := canonical{sha256.New()}
	d.text("sandbox-agent grants v1")
	d.number(len(set.names))
	for i, g := range set.names {
		d.text(g.Name)
		d.time(g.ExpiresAt)
		d.number(len(set.files[i].Files))
		for _, f := range set.files[i].Files {
			d.text(f.Path)
			d.text(string(f.Content))
		}
		d.number(len(env[g.Name]))
		for _, k := range slices.Sorted(maps.Keys(env[g.Name])) {
			d.text(k)
			d.text(env[g.Name][k])
		}
	}
	return hex.EncodeToString(d.Sum(nil))
}

type canonical struct{ hash.Hash }

func (c canonical) number(n int) { _ = binary.Write(c, binary.BigEndian, int64(n)) }
func (c canonical) text(s string) {
	c.number(len(s))
	_, _ = c.Write([]byte(s))
}

func (c canonical) time(t time.Time) {
	if t.IsZero() {
		c.number(0)
		return
	}
	c.text(t.UTC().Format(time.RFC3339Nano))
}

// expired gives the first grant whose time is over.
func expired(list []grantRecord, now time.Time) (grantRecord, bool) {
	for _, g := range list {
		if !g.ExpiresAt.IsZero() && !now.Before(g.ExpiresAt) {
			return g, true
		}
	}
	return grantRecord{}, false
}

// firstExpiry is when the first of the grants expires; zero: none does.
func firstExpiry(list []grantRecord) time.Time {
	var first time.Time
	for _, g := range list {
		if !g.ExpiresAt.IsZero() && (first.IsZero() || g.ExpiresAt.Before(first)) {
			first = g.ExpiresAt
		}
	}
	return first
}

// checkFresh refuses what has expired already.
func (set *grantSet) checkFresh() error {
	if g, over := expired(set.names, time.Now()); over {
		return invalid("grants: %q expired at %s: give one that is valid, or leave it out", g.Name, g.ExpiresAt.Format(time.RFC3339))
	}
	return nil
}

// checkBeside refuses a variable that the session sets too.
func (set *grantSet) checkBeside(env map[string]string) error {
	for _, k := range slices.Sorted(maps.Keys(set.env)) {
		if _, taken := env[k]; taken {
			return invalid("grants: env %q is set by the session's own env too: leave one out", k)
		}
	}
	return nil
}

// take makes the set the session's. Caller holds mu, or is the session's maker.
func (set *grantSet) take(s *session, r *sessionRecord) {
	set.given = s.agent.clock.instant()
	s.grants = set
	r.Grants, r.GrantsDigest = set.names, set.digest
}

// UpdateGrants replaces a session's grants by a whole new set. Whatever has the old ones ends: the running command at its
// boundary, its receipt stays; commands that wait get NOT_STARTED; the sandbox with evidence. Then the next generation is
// started with the new set. The set that the session has already changes nothing. It goes on when ctx ends.
//
// It fails with ErrInvalid, ErrNotFound, ErrPrecondition (a stale owner_epoch; the old sandbox could not be seen to be
// gone) and ErrUnavailable (no sandbox could be had). After the last two the new grants may be in place: the session's
// record says so.
func (a *Agent) UpdateGrants(ctx context.Context, r *sandboxv1.UpdateGrantsRequest) (*sandboxv1.Session, error) {
	s, err := a.find(r.GetSessionId())
	if err != nil {
		return nil, err
	}
	set, err := newGrantSet(r.GetGrants(), a.cfg.Workspace.AllowEnv)
	if err != nil {
		return nil, err
	}
	if err := set.checkFresh(); err != nil {
		return nil, err
	}
	if err := set.checkBeside(s.env()); err != nil {
		return nil, err
	}
	check := func() error {
		if err := a.checkDraining(); err != nil {
			return err
		}
		return s.checkFence(r.GetOwnerEpoch(), 0)
	}
	if err := check(); err != nil {
		return nil, err
	}
	if !s.has(set) {
		over := s.haste.hurry()
		// The job is queued before the cancel: no queued exec starts between the two.
		done := s.enqueue(func() error {
			defer over()
			return s.replaceGrants(check, set)
		})
		s.cancelRunning("the session's grants were replaced", "")
		if err := s.await(ctx, done); err != nil {
			return nil, err
		}
	}
	return s.snapshot(), nil
}

// mounted are the files, none of no set.
func (set *grantSet) mounted() []runtime.Grant {
	if set == nil {
		return nil
	}
	return set.files
}

// variables are those that commands get besides the fixed ones: the session's own, and those of its grants.
func (s *session) variables() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]string{}
	maps.Copy(all, s.rec.Env)
	if s.grants != nil {
		maps.Copy(all, s.grants.env)
	}
	return all
}

// grantsMoved says whether the sandbox has other grants than the session.
func (s *session) grantsMoved() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Sandbox != nil && s.rec.Sandbox.GrantsDigest != s.rec.GrantsDigest
}

// env is the session's own variables.
func (s *session) env() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Env
}

// has says whether the session has this very set, and its newest sandbox too.
func (s *session) has(set *grantSet) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.deleted || s.rec.GrantsDigest != set.digest || s.grantsProblem() != "" {
		return false
	}
	switch s.rec.State {
	case Idle:
		return true
	case Ready, Executing:
		return s.rec.Sandbox != nil && s.rec.Sandbox.GrantsDigest == set.digest
	}
	return false
}

// replaceGrants runs on the session's goroutine. The new set is recorded first: from then on nothing starts with the old
// one, whatever becomes of the rest.
func (s *session) replaceGrants(check func() error, set *grantSet) error {
	if err := check(); err != nil {
		return err
	}
	switch {
	case s.agent.isClosing():
		return errShutDown
	case s.state() == Deleted:
		return fmt.Errorf("%w: session %s is deleted", ErrNotFound, s.id)
	}
	if s.has(set) {
		return nil
	}
	if err := s.recordGrants(set); err != nil {
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	point("grants.recorded")
	s.log.Info("grants replaced", "grants", len(set.names), "digest", set.digest)
	s.withdrawQueued("the session's grants were replaced while it waited")
	point("grants.withdrawn")
	if s.state().HasSandbox() {
		if _, err := s.stop("The session's grants were replaced."); err != nil {
			return fmt.Errorf("%w: the grants of session %s are replaced, but its workspace stays reserved, because %w", ErrPrecondition, s.id, err)
		}
		s.settle()
	}
	point("grants.stopped")
	_, err := s.provision()
	return err
}

func (s *session) recordGrants(set *grantSet) error {
	change := func(r *sessionRecord) { set.take(s, r) }
	if s.state() == GrantsRequired {
		return s.apply(EvGrantsGiven, "", change, s.grantsEvent(set.names))
	}
	return s.save(true, change, s.grantsEvent(set.names))
}

// withdrawQueued ends every exec that waits: certainly none of them ran.
func (s *session) withdrawQueued(why string) {
	s.mu.Lock()
	var taken []*execution
	for _, e := range slices.Clone(s.queue) {
		if effects, err := s.cancelled(e); err == nil && effects.Answer {
			taken = append(taken, e)
		}
	}
	s.mu.Unlock()
	for _, e := range taken {
		s.withdraw(e, why)
	}
}

// grantsProblem says why nothing can start with the session's grants; empty when it can. Caller holds mu.
func (s *session) grantsProblem() string {
	if s.rec.GrantsDigest == "" {
		return ""
	}
	if g, over := expired(s.rec.Grants, s.grantsTime()); over {
		return fmt.Sprintf("Grant %s expired at %s.", g.Name, g.ExpiresAt.Format(time.RFC3339))
	}
	if s.grants == nil {
		return "The contents of its grants are in no memory any more, since the agent was restarted or one of them expired; they are never written to a disk."
	}
	return ""
}

// grantsTime is the time by which the grants expire. Caller holds mu.
func (s *session) grantsTime() time.Time {
	if s.grants == nil {
		return s.agent.clock.wall()
	}
	return s.agent.clock.since(s.grants.given)
}

// requireGrants refuses to start anything with grants that can't be used. It runs on the session's goroutine.
func (s *session) requireGrants() error {
	s.mu.Lock()
	why := s.grantsProblem()
	s.mu.Unlock()
	if why == "" {
		return nil
	}
	refusal := fmt.Errorf("%w: session %s needs its grants again before a command can start. %s Give them with UpdateGrants (sandbox-agent session grants)", ErrPrecondition, s.id, why)
	return alsoSay(refusal, s.forgetGrants())
}

// forgetGrants takes a session whose grants can't be used to GRANTS_REQUIRED, and ends the sandbox that has them (P15). It
// runs on the session's goroutine.
func (s *session) forgetGrants() error {
	s.mu.Lock()
	why, state := s.grantsProblem(), s.rec.State
	if why != "" {
		s.grants = nil
	}
	s.mu.Unlock()
	switch {
	case why == "":
		return nil
	case state == Idle:
		return s.apply(EvGrantsLost, why, nil)
	case state.HasSandbox():
		if _, err := s.stop(why); err != nil {
			return err
		}
		s.agent.metrics.Evicted(metrics.EvictedGrant)
		s.settle()
	}
	return nil
}

// expire ends what has grants of which one has expired: the running command at its boundary, those that wait, the sandbox.
func (s *session) expire() {
	over := s.haste.hurry()
	s.enqueue(func() error {
		defer over()
		if s.agent.isClosing() {
			return nil // the next start finds the grants gone
		}
		s.withdrawQueued("one of the session's grants expired while it waited")
		return s.ended(s.forgetGrants())
	})
	s.cancelRunning("one of the session's grants expired", metrics.EvictedGrant)
}

// gone is the event of a sandbox that was seen to be gone.
func (s *session) gone() Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grantsProblem() != "" {
		return EvEvidenceOnly
	}
	return EvEvidence
}

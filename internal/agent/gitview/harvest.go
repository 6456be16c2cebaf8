package gitview

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/gitjail"
	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
	"github.com/sandbox-agent/sandbox-agent/internal/runtime/crashpoint"
	"github.com/sandbox-agent/sandbox-agent/pkg/gitguard"
	"github.com/sandbox-agent/sandbox-agent/pkg/mounts"
)

// step is called at each point where a harvest or a refresh may be killed; tests kill there, and tests/faults kills there
// the whole agent.
var step = func(name string) { crashpoint.At("gitview." + name) }

// mostTries bounds how often refs are tried again when the base clone changes while they are written.
const mostTries = 5

// mostChanged bounds how many refs one harvest writes: a file each, in the base clone.
const mostChanged = 2000

// mostStashes bounds how many stash entries are kept.
const mostStashes = 256

// harvestTime bounds a whole harvest: cancel, retire and delete wait for it. Only tests change it.
var harvestTime = 2 * time.Minute

// Harvest brings a command's work to the base clone, after the command's boundary. It takes at most two minutes, and what
// it takes to end Git then. A failure is Status Failed with its reason in Detail; the next harvest tries again. A command
// that touched nothing costs a few stats.
func (v *View) Harvest(ctx context.Context) Harvest {
	if v.o.Layout == mounts.Shared {
		return v.harvestShared()
	}
	h := &harvest{v: v}
	ctx, cancel := context.WithTimeout(ctx, harvestTime)
	defer cancel()
	err := h.run(ctx)
	if err != nil {
		v.settled = false
		v.state.Pending = true
		h.Status, h.Refs, h.Standing = Failed, nil, v.state.Told
		h.Detail = cutTo(h.Detail, mostSaid/2) // so that there is room for why
		h.say(err.Error())
	}
	h.speakable()
	h.bound()
	return h.Harvest
}

// harvest is one harvest under way.
type harvest struct {
	Harvest
	v *View
	j *jails
	// changed are the parts of the private folder that a command touched.
	changed map[string]bool

	private  snapshot
	differ   []string // the refs of the two that this harvest looks at: where private is not as the snapshot
	base     snapshot
	head     string
	stashes  []string
	listing  []byte // nil: the index is as it was, or can't be trusted
	logLines []logLine
	log      string            // the digest of the session's log of HEAD; empty when it was not read
	types    map[string]string // of the objects that refs, index and log name, in the base clone; "" for a missing one
	failed   map[string]bool   // ids whose objects were not brought over whole
	verdict  verdict
	indexIDs []string
	wrote    bool      // something arrived in the base clone
	own      *ownMoves // what is written to the base clone's refs, where that can be told from what others do
	again    bool      // there is something left for the next harvest
}

func (h *harvest) say(format string, args ...any) {
	if len(h.Detail) >= mostSaid {
		return
	}
	if h.Detail != "" {
		h.Detail += "; "
	}
	if len(args) > 0 {
		format = fmt.Sprintf(format, args...)
	}
	h.Detail = cutTo(h.Detail+format, mostSaid)
}

func (h *harvest) run(ctx context.Context) error {
	v := h.v
	now, err := v.printPrivate()
	if err != nil {
		return err
	}
	before := v.before
	if before.Parts == nil {
		before = v.state.Clean
	}
	h.Status = Unchanged
	h.changed = before.changed(now)
	// A conflict is looked at each time: what ends it can be in the base clone alone.
	if len(h.changed) == 0 && !v.state.Pending && len(v.state.Told) == 0 {
		v.settled = true
		return nil
	}
	h.j = v.jails(ctx)
	defer h.j.close()
	h.j.soon(h.changed[partRefs] || v.state.Pending)
	for _, do := range []func(context.Context) error{
		h.look, h.read, h.bringObjects, h.moveRefs, h.exportHead, h.exportIndex, h.exportLog, h.finish,
	} {
		if err := do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// look walks the private folder before Git does, and removes the locks of whoever was killed.
func (h *harvest) look(context.Context) error {
	v := h.v
	if err := v.dropIncoming(); err != nil {
		return err
	}
	dir, err := hostfs.OpenDir("the workspace's Git folder", v.Private())
	if err != nil {
		return err
	}
	defer dir.Close()
	locks, err := walk(dir, v.o.Workspace.CommonDir)
	if err != nil {
		return err
	}
	err = v.inPrivateFolder(func(d folder) error {
		for _, name := range locks {
			if err := d.remove(name); err != nil {
				return err
			}
			h.StaleLocks = append(h.StaleLocks, v.o.Workspace.CommonDir+"/"+name)
		}
		return nil
	})
	step("locks removed")
	return err
}

// read finds out what the session and the base clone have.
func (h *harvest) read(ctx context.Context) error {
	v := h.v
	s, err := h.j.inPrivate()
	if err != nil {
		return err
	}
	if h.private, err = v.listPrivateRefs(ctx, s); err != nil {
		return err
	}
	if h.head, err = v.privateHead(); err != nil {
		h.say("HEAD is not in the base clone: %v", err)
	}
	if err := h.readStashes(ctx, s); err != nil {
		return err
	}
	if err := h.readIndex(ctx); err != nil {
		return err
	}
	if err := h.readLog(); err != nil {
		return err
	}
	h.narrow()
	print, err := v.printBase()
	if err != nil {
		return err
	}
	if v.state.Base.changed(print)[partRefs] && !v.onlyOwn() {
		return h.readBase(ctx)
	}
	h.base = snapshot{ids: maps.Clone(v.snapshot().ids), symbolic: v.snapshot().symbolic}
	for name, id := range v.state.Apart {
		h.base.set(name, id)
	}
	return nil
}

// narrow leaves out refs that this harvest does not look at: names that Git would not make, and more than can be written in
// one go. The session's own branch is never left out.
func (h *harvest) narrow() {
	v := h.v
	taken, left := 0, 0
	h.differ = []string{}
	for _, ref := range changedRefs(v.snapshot().ids, h.private.ids) {
		err := gitguard.CheckRefName(ref)
		switch taken++; {
		case err == nil && (taken <= mostChanged || ref == v.branch()):
			h.differ = append(h.differ, ref)
			continue
		case err != nil:
			h.say("a ref is not in the base clone: %v", err)
		default:
			left++
		}
		h.private.set(ref, v.snapshot().ids[ref])
	}
	if left > 0 {
		h.again = true
		h.say("%d changed refs are left for the next harvest", left)
	}
}

func (h *harvest) readBase(ctx context.Context) error {
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	text, err := h.v.listBase(ctx, s)
	h.base = text.decode()
	return err
}

func (h *harvest) readStashes(ctx context.Context, s *gitjail.Session) error {
	if h.private.ids[stashRef] == "" {
		return nil
	}
	out, err := s.Run(ctx, "log", "-g", "--format=%H", "--max-count="+strconv.Itoa(mostStashes), stashRef, "--")
	if err != nil {
		h.say("the list of stashes can't be read, and only the last one is kept: %v", err)
		h.stashes = []string{h.private.ids[stashRef]}
		return nil
	}
	h.stashes = strings.Fields(out)
	if len(h.stashes) == 0 { // it has no reflog
		h.stashes = []string{h.private.ids[stashRef]}
	}
	return nil
}

// readIndex lists the index's entries, unless they are as they were. One that trusted Git must not use is left where it
// is.
func (h *harvest) readIndex(ctx context.Context) error {
	v := h.v
	if !h.changed[partIndex] && !v.state.Pending {
		return nil
	}
	listing, err := v.listIndex(ctx, h.j)
	if err == nil {
		if digest(listing) == v.state.Listing {
			return nil
		}
		if h.indexIDs, err = v.checkOwn(ctx, h.j, listing); err == nil {
			h.listing = append([]byte{}, listing...)
			return nil
		}
	}
	if ctx.Err() != nil {
		return err
	}
	if h.j.private != nil && h.j.private.Ended() {
		h.j.dropPrivate()
	}
	h.say("the index is not in the base clone: %v", err)
	return nil
}

// headID is the commit that the session's HEAD stands for; empty when its branch has none yet.
func (h *harvest) headID() string {
	if name, isRef := strings.CutPrefix(h.head, "ref: "); isRef {
		return h.private.ids[name]
	}
	return h.head
}

// bringObjects transfers what the changed refs, HEAD, the stashes, the index and the log need.
func (h *harvest) bringObjects(ctx context.Context) error {
	known := map[string]bool{}
	for _, id := range h.base.ids {
		known[id] = true
	}
	var groups [][]string
	group := func(ids ...string) {
		var fresh []string
		for _, id := range ids {
			if id != "" && !known[id] {
				known[id] = true
				fresh = append(fresh, id)
			}
		}
		if len(fresh) > 0 {
			groups = append(groups, fresh)
		}
	}
	group(h.headID(), h.private.ids[h.v.branch()])
	for _, name := range h.differ {
		group(h.private.ids[name])
	}
	for _, id := range h.stashes {
		group(id)
	}
	refIDs := slices.Concat(groups...)
	indexIDs, logIDs := h.newIndexIDs(), h.logIDs()
	index, log, err := h.those(ctx, indexIDs, logIDs)
	if err != nil {
		return err
	}
	group(index...)
	group(log...)
	objects, failed, why := h.j.transfer(ctx, tips{groups: groups, has: h.v.negatives(h.base.ids)})
	h.Objects, h.failed = objects, failed
	if why != nil && (ctx.Err() != nil || len(failed) == len(slices.Concat(groups...))) {
		return why
	}
	if why != nil {
		h.again = true
		h.say("not all objects could be brought over: %v", why)
	}
	step("objects stored")
	return h.checkArrived(ctx, refIDs, indexIDs, logIDs)
}

// those are the ids of index and log that have to be brought over: neither has to tell the truth about what there is.
func (h *harvest) those(ctx context.Context, indexIDs, logIDs []string) (index, log []string, err error) {
	all := slices.Concat(indexIDs, logIDs)
	if len(all) == 0 {
		return nil, nil, nil
	}
	inBase := map[string]string{}
	if len(all) > mostNegatives { // a whole index: most of it is there
		s, err := h.j.inBase()
		if err != nil {
			return nil, nil, err
		}
		if inBase, err = objectTypes(ctx, s, all); err != nil {
			return nil, nil, err
		}
	}
	s, err := h.j.inPrivate()
	if err != nil {
		return nil, nil, err
	}
	here, err := objectTypes(ctx, s, all)
	useless := func(id string) bool { return here[id] == "" || inBase[id] != "" }
	return slices.DeleteFunc(slices.Clone(indexIDs), useless), slices.DeleteFunc(slices.Clone(logIDs), useless), err
}

// checkArrived asks the base clone for what refs, index and log name. A missing object there would stop its gc, and one
// ref that can't be written would stop all of them.
func (h *harvest) checkArrived(ctx context.Context, refIDs, indexIDs, logIDs []string) error {
	all := slices.Concat(refIDs, indexIDs, logIDs)
	if len(all) == 0 {
		return nil
	}
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	if h.types, err = objectTypes(ctx, s, all); err != nil {
		return err
	}
	if err := h.distrust(ctx, s); err != nil {
		return err
	}
	for _, id := range indexIDs {
		if h.types[id] != "blob" {
			h.say("the index is not in the base clone: its object %s is %s", id, orMissing(h.types[id]))
			h.listing = nil
			break
		}
	}
	h.logLines = slices.DeleteFunc(h.logLines, func(l logLine) bool {
		return !isZero(l.old) && h.types[l.old] != "commit" || !isZero(l.new) && h.types[l.new] != "commit"
	})
	return nil
}

// distrust takes what did not arrive whole for missing, although the base clone has an object of that id: unless a ref of
// its own needs it, nobody has said that what it names is there.
func (h *harvest) distrust(ctx context.Context, s *gitjail.Session) error {
	asked := 0
	for id := range h.failed {
		kind := h.types[id]
		if kind == "" {
			continue
		}
		h.types[id] = ""
		if asked++; kind != "commit" || asked > mostParts {
			continue
		}
		out, err := s.Run(ctx, "for-each-ref", "--count=1", "--contains="+id)
		if err != nil {
			return err
		}
		if out != "" {
			h.types[id] = kind
		}
	}
	return nil
}

// arrived says whether the base clone has an object that a ref of that name can name.
func (h *harvest) arrived(ref, id string) bool {
	kind, asked := h.types[id]
	return !asked || kind != "" && (kind == "commit" || !strings.HasPrefix(ref, heads))
}

func orMissing(kind string) string {
	if kind == "" {
		return "missing"
	}
	return "a " + kind
}

// moveRefs decides and writes, and decides again when the base clone changed meanwhile.
func (h *harvest) moveRefs(ctx context.Context) error {
	for try := 1; ; try++ {
		err := h.tryRefs(ctx, try)
		if err == nil || try == mostTries || ctx.Err() != nil {
			return err
		}
		select { // a ref's lock is held for as long as it takes to write it
		case <-ctx.Done():
			return err
		case <-time.After(time.Duration(try) * 10 * time.Millisecond):
		}
		if err := h.readBase(ctx); err != nil {
			return err
		}
		if err := h.readMirror(ctx); err != nil {
			return err
		}
	}
}

// tryRefs writes all refs in one transaction, or in the last try one by one, so that one which can't be written doesn't
// hold back the others.
func (h *harvest) tryRefs(ctx context.Context, try int) error {
	v := h.v
	d := decision{
		before: v.snapshot().ids, now: h.private.ids, changed: h.differ, base: h.base.ids, symbolic: h.base.symbolic,
		branch: v.branch(), created: v.state.Created, arrived: h.arrived, remotes: v.remotes(h.base),
		exported: func(ref string) bool {
			return slices.ContainsFunc(v.o.Export, func(p string) bool { return gitguard.Matches(p, ref) })
		},
		isAncestor: func(base, now string) (bool, error) { return h.isAncestor(ctx, base, now) },
	}
	var err error
	if d.needsElsewhere() {
		if d.elsewhere, err = h.elsewhere(ctx); err != nil {
			return err
		}
	}
	if h.verdict, err = decide(d); err != nil {
		return err
	}
	moves := append(slices.Clone(h.verdict.moves), h.mirror()...)
	if len(moves) == 0 {
		return nil
	}
	if err := v.announce(h.verdict.made); err != nil {
		return err
	}
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	step("refs decided")
	h.own = nil
	if try == 1 { // before another one, somebody else wrote
		h.own = v.beforeMoves(h.verdict.moves)
	}
	v.own = nil
	why := "sandbox-agent: harvest of session " + v.o.SessionID
	if try == mostTries {
		h.moveApart(ctx, s, why, moves)
	} else if err := runMoves(unbroken(ctx), s, nil, why, moves); err != nil {
		return err
	}
	h.wrote = true
	step("refs moved")
	return nil
}

func (h *harvest) moveApart(ctx context.Context, s *gitjail.Session, why string, moves []move) {
	parts := apartByName(moves)
	for _, m := range slices.Concat(parts[0], parts[1]) {
		err := ctx.Err()
		if err == nil {
			err = runMoves(unbroken(ctx), s, nil, why, []move{m})
		}
		if err != nil {
			h.again = true
			h.say("%s was not written: %v", m.ref, err)
			h.verdict.moves = slices.DeleteFunc(h.verdict.moves, func(x move) bool { return x.ref == m.ref })
			delete(h.verdict.made, m.ref)
		}
	}
}

// announce keeps which branches are about to be made: after a kill they could not be told from somebody else's.
func (v *View) announce(made map[string]bool) error {
	fresh := false
	for ref := range made {
		if !v.state.Created[ref] {
			if v.state.Created == nil {
				v.state.Created = map[string]bool{}
			}
			v.state.Created[ref], fresh = true, true
		}
	}
	if !fresh {
		return nil
	}
	return v.save(false)
}

// isAncestor asks the base clone: in the session's own objects a command may have replaced any.
func (h *harvest) isAncestor(ctx context.Context, base, now string) (bool, error) {
	s, err := h.j.inBase()
	if err != nil {
		return false, err
	}
	r, err := s.Do(ctx, gitjail.Call{Args: []string{"merge-base", "--is-ancestor", base, now}})
	return err == nil && r.ExitCode == 0, err
}

// elsewhere lists the branches that other worktrees than the session's are on.
func (h *harvest) elsewhere(ctx context.Context) (map[string]string, error) {
	s, err := h.j.inBase()
	if err != nil {
		return nil, err
	}
	out, err := s.Run(ctx, "worktree", "list", "--porcelain", "-z")
	if err != nil {
		return nil, err
	}
	on, path := map[string]string{}, ""
	for field := range strings.SplitSeq(out, "\x00") {
		if p, ok := strings.CutPrefix(field, "worktree "); ok {
			path = p
		}
		if ref, ok := strings.CutPrefix(field, "branch "); ok && path != h.v.o.Workspace.Worktree {
			on[ref] = path
		}
	}
	return on, nil
}

// mirrorName is where a ref of the session is kept in the base clone, so that its gc keeps what the ref needs.
func mirrorName(session, ref string) string {
	return mirrorOf(session) + "/" + inUTF8(strings.TrimPrefix(ref, "refs/"))
}

// mirrorOf is the folder of a session's refs. A session's id may have dots where a ref's name can't ("a..b", "x.lock").
func mirrorOf(session string) string {
	name := sandboxes + session
	if gitguard.CheckRefName(name) != nil {
		name = sandboxes + strings.ReplaceAll(session, ".", "%2E")
	}
	return name
}

// wantedMirror is what should be kept of the session's refs: of those that differ from the snapshot, and of each stash.
func (h *harvest) wantedMirror() (want refs, gone []string) {
	v := h.v
	want = refs{}
	for _, ref := range h.differ {
		id := h.private.ids[ref]
		switch {
		case strings.HasPrefix(ref, sandboxes) || ref == stashRef || h.base.symbolic[ref] != "":
		case id == "": // below
		case h.arrived(stashRef, id): // of any kind: it is no branch there
			want[mirrorName(v.o.SessionID, ref)] = id
		}
	}
	for i, id := range h.stashes {
		if h.arrived(stashRef, id) {
			want[mirrorName(v.o.SessionID, "refs/stash/"+strconv.Itoa(i))] = id
		}
	}
	for name := range v.state.Mirror {
		_, rest, _ := strings.Cut(strings.TrimPrefix(name, sandboxes), "/")
		stash := strings.HasPrefix(rest, "stash/")
		// Another session's stashes are this one's too: it has them under names of its own.
		if want[name] == "" && (stash || h.private.ids["refs/"+rest] == "") {
			gone = append(gone, name)
		}
	}
	return want, gone
}

func (h *harvest) mirror() []move {
	want, gone := h.wantedMirror()
	var moves []move
	for _, name := range sortedKeys(want) {
		if h.v.state.Mirror[name] != want[name] {
			moves = append(moves, move{ref: name, old: anyOld, new: want[name]})
		}
	}
	for _, name := range gone {
		if h.v.state.Mirror[name] != "" {
			moves = append(moves, move{ref: name, old: anyOld})
		}
	}
	// A ref that became a folder of refs, or the other way round: what is kept of the older one makes room.
	for name := range h.v.state.Mirror {
		if want[name] == "" && !slices.Contains(gone, name) && inTheWayOf(name, want) {
			moves = append(moves, move{ref: name, old: anyOld})
		}
	}
	return moves
}

func inTheWayOf(name string, want refs) bool {
	for dir := range foldersOf(name) {
		if want[dir] != "" {
			return true
		}
	}
	for other := range want {
		if strings.HasPrefix(other, name+"/") {
			return true
		}
	}
	return false
}

// readMirror asks the base clone what it really keeps: somebody may have deleted some of it.
func (h *harvest) readMirror(ctx context.Context) error {
	s, err := h.j.inBase()
	if err != nil {
		return err
	}
	h.v.state.Mirror = refs{}
	for _, session := range h.v.sessions {
		out, err := s.Run(ctx, "for-each-ref", "--format=%(objectname) %(refname)", mirrorOf(session))
		if err != nil {
			return err
		}
		for line := range strings.Lines(out) {
			if id, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok {
				h.v.state.Mirror[name] = id
			}
		}
	}
	return nil
}

// finish takes note of what base clone and session now have in common. Until here a kill changes nothing but that the
// next harvest finds most of it done.
func (h *harvest) finish(ctx context.Context) error {
	v := h.v
	step("before the state")
	if h.own != nil {
		v.own = h.own
	}
	h.keepMirror() // before the snapshot says that nothing differs any more
	for name, id := range h.verdict.agreed {
		v.snapshot().set(name, id)
	}
	if v.state.Created == nil {
		v.state.Created = map[string]bool{}
	}
	for ref := range h.verdict.made {
		v.state.Created[ref] = true
	}
	for _, m := range h.verdict.moves {
		v.snapshot().set(m.ref, m.new)
		h.Refs = append(h.Refs, m.ref)
		if m.new == "" {
			delete(v.state.Created, m.ref)
		}
	}
	for _, c := range h.verdict.conflicts {
		if c.BeforeID == "" {
			delete(v.state.Created, c.Ref)
		}
	}
	h.keepApart()
	resolved := h.tellOnce()
	if len(h.verdict.lost) > 0 {
		h.say("not moved, for want of their objects: %s", strings.Join(h.verdict.lost, ", "))
	}
	h.tellKept()
	switch {
	case len(h.Conflicts) > 0:
		h.Status = Conflicts
	case v.state.HeldBack != "":
		h.Status = Failed
	case h.wrote || resolved:
		h.Status = Harvested
	}
	if v.state.HeldBack != "" {
		h.say("what changed in the base clone could not be brought in: %s", v.state.HeldBack)
		h.again = true
	}
	slices.Sort(h.Refs)
	v.state.Pending = h.again
	var err error
	if v.state.Clean, err = v.printPrivate(); err != nil {
		return err
	}
	if err := v.save(true); err != nil {
		return err
	}
	v.settled = true
	v.before = print{}
	step("after the state")
	return nil
}

// tellOnce tells conflicts of refs that were told already from those that are news, which another value on either side
// makes them, and says whether one that was told is there no more. Those of HEAD and index are over when they are told.
func (h *harvest) tellOnce() (resolved bool) {
	v := h.v
	same := func(a, b Conflict) bool { return a.Ref == b.Ref && a.BaseID == b.BaseID && a.SessionID == b.SessionID }
	among := func(list []Conflict, c Conflict) bool {
		return slices.ContainsFunc(list, func(x Conflict) bool { return same(x, c) })
	}
	var news []Conflict
	for _, c := range h.verdict.conflicts {
		// One that keeps the base clone's changes out of the session is told until it doesn't.
		if among(v.state.Told, c) && v.state.HeldBack == "" {
			h.Standing = append(h.Standing, c)
		} else {
			news = append(news, c)
		}
	}
	resolved = slices.ContainsFunc(v.state.Told, func(c Conflict) bool { return !among(h.verdict.conflicts, c) })
	h.Conflicts = append(news, h.Conflicts...)
	v.state.Told = h.verdict.conflicts
	return resolved
}

// tellKept tells of new branches that are not made in the base clone, of each once until it moves.
func (h *harvest) tellKept() {
	v := h.v
	told := v.state.Kept
	v.state.Kept = refs{}
	var news []string
	for _, k := range h.verdict.kept {
		name := stateKey(k.ref)
		if v.state.Kept[name] = k.id; told[name] != k.id {
			news = append(news, fmt.Sprintf("%s (%s)", shortened(k.ref), k.why))
		}
	}
	if len(news) == 0 {
		return
	}
	is, its, other := "are", "their names", "them other names"
	if len(news) == 1 {
		is, its, other = "is", "its name", "it another name"
	}
	h.say("%s %s only below %s, for in the base clone %s would be taken for something else: %s; give %s (git branch -m)",
		countOf(len(news), "new branch", "new branches"), is, mirrorOf(v.o.SessionID), its, strings.Join(news[:min(len(news), mostNamed)], ", "), other)
}

// stateKey is a ref's name as the state can hold it, which is that of no other ref: one that is no UTF-8 is quoted, and none
// begins with a quote.
func stateKey(ref string) string {
	if utf8.ValidString(ref) {
		return ref
	}
	return strconv.Quote(ref)
}

// keepApart takes note of what the base clone has otherwise than the session, so that it is news only once.
func (h *harvest) keepApart() {
	v := h.v
	v.state.Apart = refs{}
	for _, ref := range h.differ {
		if h.private.ids[ref] != v.snapshot().ids[ref] && h.base.ids[ref] != v.snapshot().ids[ref] {
			v.state.Apart[ref] = h.base.ids[ref]
		}
	}
}

func (h *harvest) keepMirror() {
	want, gone := h.wantedMirror()
	if h.v.state.Mirror == nil {
		h.v.state.Mirror = refs{}
	}
	for name := range h.v.state.Mirror {
		if slices.Contains(gone, name) || want[name] == "" && inTheWayOf(name, want) {
			delete(h.v.state.Mirror, name)
		}
	}
	maps.Copy(h.v.state.Mirror, want)
}

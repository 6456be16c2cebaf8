package gitview

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// decision is what a harvest knows when it decides which refs of the base clone move.
type decision struct {
	// before is what both had, now what the session has, base what the base clone has.
	before, now, base refs
	// changed are the names of which before and now differ, in order; nil: they are looked for.
	changed []string
	// symbolic are the base clone's symbolic refs: they stay the host's.
	symbolic refs
	// branch is the session's own branch, as a ref; created are those that this workspace made.
	branch  string
	created map[string]bool
	// remotes are the names of the base clone's remotes.
	remotes map[string]bool
	// exported says whether an operator's pattern covers a ref.
	exported func(ref string) bool
	// elsewhere maps branches to the other worktree that they are checked out in.
	elsewhere map[string]string
	// arrived says whether the base clone has an object that the ref can name.
	arrived func(ref, id string) bool
	// isAncestor says whether the session's commit comes from the base's.
	isAncestor func(base, now string) (bool, error)
}

// verdict is what a decision comes to.
type verdict struct {
	// moves are made in the base clone; agreed are refs that it has as the session has them.
	moves  []move
	agreed refs
	// made are the branches among moves that the base clone did not have.
	made      map[string]bool
	conflicts []Conflict
	// lost are refs whose objects did not arrive, or are none that the ref can name.
	lost []string
	// kept are new branches that are not made in the base clone.
	kept []keptBranch
}

// keptBranch is a new branch of the session, and why it is not made in the base clone.
type keptBranch struct{ ref, id, why string }

// decide is the rule of which refs of a session reach the base clone under their own names: the session's branch and
// those that this workspace made, if nobody else moved them or what is there is an ancestor; a new branch, if there is
// none; others only as the operator says.
func decide(d decision) (verdict, error) {
	out := verdict{agreed: refs{}, made: map[string]bool{}}
	for _, ref := range d.differ() {
		before, now, base := d.before[ref], d.now[ref], d.base[ref]
		switch {
		case d.symbolic[ref] != "":
			continue
		case base == now:
			out.agreed[ref] = now
			if d.created[ref] && before == "" {
				out.made[ref] = true // a harvest that was interrupted had made it
			}
			continue
		case d.withheld(ref, before) != "":
			out.kept = append(out.kept, keptBranch{ref: ref, id: now, why: d.withheld(ref, before)})
			continue
		case !d.mine(ref, before):
			continue
		case now != "" && !d.arrived(ref, now):
			out.lost = append(out.lost, ref)
			continue
		}
		c, err := d.clash(ref, before, now, base)
		switch {
		case err != nil:
			return out, err
		case c != "":
			out.conflicts = append(out.conflicts, Conflict{Ref: ref, BaseID: base, SessionID: now, BeforeID: before, Remedy: c})
		default:
			out.moves = append(out.moves, move{ref: ref, old: base, new: now})
			if base == "" && strings.HasPrefix(ref, heads) {
				out.made[ref] = true
			}
		}
	}
	return out, nil
}

func (d decision) differ() []string {
	if d.changed == nil {
		return changedRefs(d.before, d.now)
	}
	return d.changed
}

// changedRefs are the names whose ids differ, in order.
func changedRefs(before, now refs) []string {
	var out []string
	for name, id := range now {
		if before[name] != id {
			out = append(out, name)
		}
	}
	for name := range before {
		if _, there := now[name]; !there {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// mine says whether a ref is one that this session exports. A replacement (refs/replace/) would change what other objects
// mean, and never is.
func (d decision) mine(ref, before string) bool {
	switch {
	case strings.HasPrefix(ref, "refs/replace/") || strings.HasPrefix(ref, sandboxes) || ref == stashRef || perWorktree(ref):
		return false
	case ref == d.branch || d.created[ref]:
		return true
	case before == "" && strings.HasPrefix(ref, heads):
		return d.withheld(ref, before) == ""
	default:
		return d.exported(ref)
	}
}

// remotes are those of the base clone's configuration and those that it has refs of.
func (v *View) remotes(base snapshot) map[string]bool {
	out := map[string]bool{}
	for _, e := range v.o.Config.Entries {
		if rest, ok := strings.CutPrefix(e.Key, "remote."); ok {
			if dot := strings.LastIndexByte(rest, '.'); dot > 0 {
				out[rest[:dot]] = true
			}
		}
	}
	for _, m := range []refs{base.ids, base.symbolic} {
		for ref := range m {
			if rest, ok := strings.CutPrefix(ref, "refs/remotes/"); ok {
				name, _, _ := strings.Cut(rest, "/")
				out[name] = true
			}
		}
	}
	return out
}

// clash is the remedy when a ref can't move, and empty when it can.
func (d decision) clash(ref, before, now, base string) (string, error) {
	if path := d.elsewhere[ref]; path != "" && base != "" {
		return fmt.Sprintf("%s is checked out in %s: switch that worktree to another branch (git -C %[2]s switch --detach), and it moves with the next harvest", ref, path), nil
	}
	if base == before {
		return d.inTheWay(ref, base), nil
	}
	switch {
	case before == "":
		return fmt.Sprintf("the base clone got another %s meanwhile: give the session's another name (git branch -m), or merge what is there (git merge %s)", ref, base), nil
	case now == "":
		return fmt.Sprintf("the session deleted %s, which was moved in the base clone to %s: delete it there, or take it back in the session (git branch %s %[2]s)", ref, base, word(strings.TrimPrefix(ref, heads))), nil
	case base == "":
		return fmt.Sprintf("%s was deleted in the base clone: make it there again (git update-ref %s %s), or give the session's another name (git branch -m)", ref, word(ref), now), nil
	}
	ff, err := d.isAncestor(base, now)
	if err != nil || ff {
		return "", err
	}
	return fmt.Sprintf("the base clone's %s was moved to %s meanwhile: take it in with git merge %[2]s (or git rebase %[2]s) in the session, and it moves with the next harvest", ref, base), nil
}

// inTheWay finds a ref of the base clone that a new one can't be beside: "a" and "a/b".
func (d decision) inTheWay(ref, base string) string {
	if base != "" {
		return ""
	}
	say := func(other string) string {
		return fmt.Sprintf("the base clone has %s, beside which there can be no %s: give the session's another name (git branch -m)", other, ref)
	}
	for dir := range foldersOf(ref) {
		if d.stays(dir) {
			return say(dir)
		}
	}
	for _, m := range []refs{d.base, d.symbolic} {
		for other := range maps.Keys(m) {
			if strings.HasPrefix(other, ref+"/") && d.stays(other) {
				return say(other)
			}
		}
	}
	return ""
}

// stays says whether a ref of the base clone is one that this harvest does not delete.
func (d decision) stays(ref string) bool {
	if d.symbolic[ref] != "" {
		return true
	}
	base := d.base[ref]
	deletes := base != "" && d.now[ref] == "" && d.before[ref] == base && d.mine(ref, base) && d.elsewhere[ref] == ""
	return base != "" && !deletes
}

// needsElsewhere says whether a decision depends on where branches are checked out: it moves one that is not the session's
// own worktree's.
func (d decision) needsElsewhere() bool {
	for _, ref := range d.differ() {
		if ref != d.branch && d.base[ref] != "" && d.base[ref] != d.now[ref] && strings.HasPrefix(ref, heads) && d.mine(ref, d.before[ref]) {
			return true
		}
	}
	return false
}

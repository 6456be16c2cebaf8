package gitview

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/internal/agent/hostfs"
)

// A harvest changes the base clone's print itself. That nobody else changed a ref of it at the same time, or since, is seen
// without asking Git for all of its refs again: all other refs' files are as they were before the harvest wrote, and its own
// hold what it wrote.

// ownMoves are the refs that the last harvest wrote, less the sandboxes', which no print has.
type ownMoves struct {
	ids refs
	// others is the print of the files of all other refs, from before the harvest wrote.
	others string
}

// beforeMoves takes note of what a harvest is about to write. It gives nil when the base clone's refs are not known to be
// what v has of them, or can't be told apart later.
func (v *View) beforeMoves(moves []move) *ownMoves {
	own := &ownMoves{ids: refs{}}
	for _, m := range moves {
		own.ids[m.ref] = m.new
	}
	var ok bool
	if own.others, ok = v.printOthers(own.ids); !ok {
		return nil
	}
	// After that print: it is then of what v knows.
	now, err := v.printBase()
	if err != nil || v.state.Base.changed(now)[partRefs] && !v.onlyOwn() {
		return nil
	}
	return own
}

// onlyOwn says whether nothing but the last harvest changed refs of the base clone since v last knew all of them.
func (v *View) onlyOwn() bool {
	if v.own == nil || v.state.HeldBack != "" {
		return false
	}
	others, ok := v.printOthers(v.own.ids)
	return ok && others == v.own.others && v.ownAreThere()
}

// ownAreThere looks into the files of the refs that were written. A file with an id and nothing else is what Git itself
// writes, and counts before all that is packed; one that is deleted is packed no more either, for others would differ then.
func (v *View) ownAreThere() bool {
	err := v.inBaseFolder(func(d folder) error {
		for name, id := range v.own.ids {
			b, err := d.read(name, int64(len(id))+1)
			switch {
			case id == "" && errors.Is(err, unix.ENOENT):
			case err != nil:
				return err
			case id == "" || string(b) != id+"\n":
				return errOther
			}
		}
		return nil
	})
	return err == nil
}

var errOther = errors.New("it has another value")

func (v *View) printOthers(own refs) (sum string, ok bool) {
	d, err := hostfs.OpenDir("the repository's Git folder", v.o.Workspace.CommonDir)
	if err != nil {
		return "", false
	}
	defer d.Close()
	return printOthers(d, own)
}

// printOthers is of the files of the base clone's refs but some. It is of no folder, for each write changes its ref's. ok is
// false when there are too many to look at each, or one changed so shortly before that the next change could look the same.
func printOthers(dir *os.File, but refs) (sum string, ok bool) {
	p := newPrinter(dir)
	p.filesOnly = true
	p.part(partRefs, "packed-refs", "reftable/tables.list")
	packed := p.print.Parts[partRefs]
	skipped := func(path string, _ bool) bool {
		_, own := but[path]
		return own || path == "refs/sandboxes"
	}
	p.part(partRefs)
	p.below(dir, "refs", "refs", 0, skipped)
	racy := p.print.Racy || p.racy()
	return packed + p.sum(), !racy && p.seen <= mostBaseFiles
}

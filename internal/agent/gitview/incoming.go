package gitview

import (
	"crypto/rand"
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Objects arrive in a folder of their own among the base clone's objects, as git receive-pack has it: Git's check comes
// after it has written them, and what the base clone has counts as checked ever after. They are moved to the others only
// once Git has said that they are sound. Git's own clean-up knows such folders by the beginning of their names.

// incomingName begins the names of a workspace's folders. Each has a name of its own: a Git that outlives its agent must not
// write into the next one's.
func (v *View) incomingName() string {
	return "objects/tmp_objdir-sandbox-agent-" + filepath.Base(v.o.Dir) + "-"
}

// incoming makes a folder for objects that arrive, and gives its name in the base clone's Git folder.
func (v *View) incoming() (string, error) {
	name := v.incomingName() + rand.Text()
	return name, v.inBaseFolder(func(d folder) error { return d.mkdir(name + "/pack") })
}

// accept moves what has arrived to the base clone's objects. Of what is there already, that one stays.
func (v *View) accept(name string) error {
	return v.inBaseFolder(func(d folder) error {
		parts, err := d.names(name)
		if err != nil {
			return err
		}
		for _, part := range parts {
			if part != "pack" && len(part) != 2 {
				continue // no objects
			}
			if err := d.place(name+"/"+part, "objects/"+part); err != nil {
				return err
			}
		}
		return nil
	})
}

// dropIncoming removes what has arrived and was not accepted, also what a killed agent left.
func (v *View) dropIncoming() error {
	return v.inBaseFolder(func(d folder) error {
		names, err := d.names("objects")
		if err != nil {
			return err
		}
		for _, name := range names {
			if strings.HasPrefix("objects/"+name, v.incomingName()) {
				if err := d.removeAll("objects/" + name); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

func (v *View) inBaseFolder(f func(d folder) error) error {
	return inFolder("the repository's Git folder", v.o.Workspace.CommonDir, v.o.Workspace.Owner, f)
}

// place moves a file or folder, and replaces nothing: a folder that is there gets what the other one has.
func (d folder) place(from, to string) error {
	err := d.move(from, to)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	st, _, err := d.lstat(from)
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	names, err := d.names(from)
	if err != nil {
		return err
	}
	slices.SortFunc(names, indexesLast)
	for _, name := range names {
		if strings.HasPrefix(name, "tmp_") {
			continue
		}
		if err := d.place(from+"/"+name, to+"/"+name); err != nil {
			return err
		}
	}
	return nil
}

// indexesLast: Git takes a pack for whole once its index is there.
func indexesLast(a, b string) int {
	rank := func(name string) int {
		if strings.HasSuffix(name, ".idx") {
			return 1
		}
		return 0
	}
	return rank(a) - rank(b)
}

// move renames. It fails with EEXIST when there is something, and falls back to a hard link on file systems that can't
// tell.
func (d folder) move(from, to string) error {
	a, err := d.parent(from)
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := d.parent(to)
	if err != nil {
		return err
	}
	defer b.Close()
	one, other := filepath.Base(from), filepath.Base(to)
	err = unix.Renameat2(int(a.Fd()), one, int(b.Fd()), other, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		err = moveByLink(int(a.Fd()), one, int(b.Fd()), other)
	}
	if err != nil {
		return d.fail("moving objects to", to, err)
	}
	return nil
}

func moveByLink(a int, from string, b int, to string) error {
	var st unix.Stat_t
	if err := unix.Fstatat(a, from, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.Linkat(a, from, b, to, 0)
	}
	if err := unix.Mkdirat(b, to, st.Mode&0o7777); err != nil {
		return err
	}
	return unix.EEXIST // there now, and empty
}

// removeAll takes a name away with all that is in it.
func (d folder) removeAll(name string) error {
	st, found, err := d.lstat(name)
	if err != nil || !found {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return d.remove(name)
	}
	names, err := d.names(name)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := d.removeAll(name + "/" + n); err != nil {
			return err
		}
	}
	parent, err := d.parent(name)
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := unix.Unlinkat(int(parent.Fd()), filepath.Base(name), unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return d.fail("removing the folder", name, err)
	}
	return nil
}

// into has Git write objects to a folder, and read also those that the base clone has. The list of object folders is
// separated by colons, unless a path is in quotes (git(1), GIT_ALTERNATE_OBJECT_DIRECTORIES).
func (v *View) into(name string) []string {
	c := v.o.Workspace.CommonDir
	quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(c+"/objects") + `"`
	return []string{"GIT_OBJECT_DIRECTORY=" + c + "/" + name, "GIT_ALTERNATE_OBJECT_DIRECTORIES=" + quoted}
}

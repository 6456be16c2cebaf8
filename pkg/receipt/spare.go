package receipt

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Spare files are space that is really allocated, so that a command that was let start gets its receipt on a full
// disk too (facts.md, hole 8). There are two sets: a small one, one block each, that the next Commit takes in any
// case (it is quicker than making files, see durable.go), and a large one with the most that the next Commit can
// need, taken only when a small one can't grow, and so made once in a sandbox's life. The ballast is for the folder
// itself: a rename can need another block for its entry, which is then freed by cutting the ballast.
const (
	ballastName  = spareMark + "ballast"
	largeEnding  = ".large"
	smallBytes   = 4096
	ballastBytes = 64 << 10
	// receiptBytes is above the largest envelope of a bounded predicate with the API's largest labels: 32 labels of
	// 64+256 bytes and 2·33 listed texts of maxText, each byte at most 6 in JSON, 4/3 of that in base64.
	receiptBytes = 384 << 10
)

type spare struct {
	name  string
	bytes uint64
}

// spares lists what Reserve keeps ready; the large ones first, because they are what may not be had.
func (s *Store) spares() []spare {
	return []spare{
		{ballastName, ballastBytes},
		{spareName(receiptEnding, true), receiptBytes},
		{spareName(stdoutEnding, true), s.outputBytes},
		{spareName(stderrEnding, true), s.outputBytes},
		{spareName(receiptEnding, false), smallBytes},
		{spareName(stdoutEnding, false), smallBytes},
		{spareName(stderrEnding, false), smallBytes},
	}
}

func spareName(ending string, large bool) string {
	if large {
		return spareMark + ending + largeEnding
	}
	return spareMark + ending
}

// Reserve makes sure that the space of the next Commit is allocated: its receipt, both kept outputs and the folder's
// growth. It costs nothing when it is, and may be called in the background after each Commit; a Commit waits for it.
// It fails with ErrNoSpace, naming the folder: then nothing may start (promise P16).
func (s *Store) Reserve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil {
		return s.failed
	}
	for _, sp := range s.spares() {
		if s.ready[sp.name] {
			continue
		}
		if err := s.makeSpare(sp); err != nil {
			return err
		}
		s.ready[sp.name] = true
	}
	return nil
}

func (s *Store) makeSpare(sp spare) error {
	err := s.allocateSpare(sp)
	if err == nil {
		return nil
	}
	_ = unix.Unlinkat(s.dir, sp.name, 0)
	if noSpace(err) {
		return fmt.Errorf("reserving %d bytes in %s: %w: %w; free space or inodes on that file system, or raise its quota", sp.bytes, s.path, ErrNoSpace, err)
	}
	return fmt.Errorf("reserving %d bytes in %s: %w", sp.bytes, s.path, err)
}

func (s *Store) allocateSpare(sp spare) error {
	fd, err := s.openAt(sp.name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if sp.bytes == 0 {
		return nil
	}
	err = retry(func() error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, int64(sp.bytes)) })
	if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
		// NFS before 4.2, some FUSE file systems: write the space instead. Commit cuts what it doesn't fill.
		return writeZeros(fd, sp.bytes)
	}
	return err
}

func writeZeros(fd int, n uint64) error {
	zeros := make([]byte, 64<<10)
	for off := uint64(0); off < n; off += uint64(len(zeros)) {
		if err := writeAll(fd, zeros[:min(uint64(len(zeros)), n-off)], int64(off)); err != nil {
			return err
		}
	}
	return fsync(fd)
}

// dropBallast gives the folder room to grow. The sync has ext4 commit: blocks freed by a transaction are only handed
// out again once it has (fs/ext4/mballoc.c, ext4_process_freed_data).
func (s *Store) dropBallast() error {
	fd, err := s.openAt(ballastName, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	s.ready[ballastName] = false
	if err := retry(func() error { return unix.Ftruncate(fd, 0) }); err != nil {
		return err
	}
	return fsync(fd)
}

// RemoveSpares removes what a Store keeps ready or left half-made in a sandbox's receipts folder: names with a "~", which
// no receipt and no kept output has. It is for whoever has evidence that the sandbox, and with it the Store, is gone. It
// follows no link. A folder that does not exist has none.
func RemoveSpares(dir string) error {
	fd, err := openDir(dir)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	names, err := readNames(fd, dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.Contains(name, spareMark) {
			continue
		}
		if err := unix.Unlinkat(fd, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing the spare file %s/%s: %w", dir, name, err)
		}
	}
	return nil
}

package receipt

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxKept bounds one kept output, bytes.
const MaxKept = 64 << 20

// Store is the writing side of one sandbox's receipts folder: receiptd's. It reaches everything by a descriptor of the
// folder, which it owns; nobody else may write there. Its methods may be called at the same time.
type Store struct {
	path        string // for messages only
	outputBytes uint64
	oneJournal  bool

	mu     sync.Mutex
	dir    int
	ready  map[string]bool // spare files that are there, by name
	seq    uint64
	last   string
	failed error
}

// OpenStore opens a sandbox's receipts folder, removes the debris of an interrupted Commit (spare files, kept output
// without a receipt) and finds the end of the chain. outputBytes is the most that is kept of one stream, 0 to MaxKept.
//
// The folder must exist, and its own entry must be durable: whoever makes it syncs its parent. OpenStore fails with
// ErrMalformed when a file that is there is no receipt: a chain with a hole is not continued.
func OpenStore(dir string, outputBytes uint64) (*Store, error) {
	if outputBytes > MaxKept {
		return nil, fmt.Errorf("opening the receipts folder %s: keeping %d bytes of a stream: %w: at most %d", dir, outputBytes, ErrTooLarge, MaxKept)
	}
	fd, err := openDir(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{path: dir, outputBytes: outputBytes, dir: fd, oneJournal: oneJournal(fd), ready: map[string]bool{}}
	if err := s.recover(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return s, nil
}

// Close releases the folder. The spare files stay; the next OpenStore removes them.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dir < 0 {
		return nil
	}
	err := unix.Close(s.dir)
	s.dir, s.failed = -1, fmt.Errorf("receipts folder %s: %w: it is closed", s.path, ErrFailed)
	return err
}

// Last is the end of the chain: how many receipts there are, and the SHA-256 (lower-case hex) of the newest envelope.
func (s *Store) Last() (sequence uint64, sha256 string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seq, s.last
}

// Has says whether the exec has a receipt.
func (s *Store) Has(execID string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return CheckExecID(execID) == nil && s.exists(FileName(execID))
}

func (s *Store) recover() error {
	names, err := readNames(s.dir, s.path)
	if err != nil {
		return err
	}
	removed, err := readRemoved(s.dir, s.path)
	if err != nil {
		return err
	}
	s.seq, s.last = removed.Sequence, removed.SHA256
	has := map[string]bool{}
	for _, name := range names {
		id, ok := ExecIDOf(name)
		if !ok {
			continue
		}
		has[id] = true
		if err := s.seen(id); err != nil {
			return err
		}
	}
	for _, name := range names {
		if id, output := execIDOfOutput(name); strings.HasPrefix(name, spareMark) || output && !has[id] {
			if err := unix.Unlinkat(s.dir, name, 0); err != nil {
				return fmt.Errorf("removing debris %s/%s: %w", s.path, name, err)
			}
		}
	}
	return nil
}

func (s *Store) seen(id string) error {
	b, err := readAt(s.dir, s.path, FileName(id), MaxEnvelope)
	if err != nil {
		return err
	}
	e, err := Parse(b)
	if err != nil {
		return fmt.Errorf("finding the end of the chain in %s: %s: %w; the sandbox must be retired", s.path, FileName(id), err)
	}
	if e.Predicate.Sequence > s.seq {
		s.seq, s.last = e.Predicate.Sequence, hexSHA256(b)
	}
	return nil
}

// part is one file of a Commit.
type part struct {
	ending string
	final  string
	data   []byte
	fd     int
	spare  string
}

// Commit makes one exec's receipt and kept output durable: after it returns, a power cut loses nothing of them. It
// sets p's Sequence, Previous and the kept sizes and hashes, signs, and gives the envelope's SHA-256 (lower-case hex).
//
// A crash before it returns leaves a receipt with its whole output, or no receipt; a power cut may, where the file system
// has no ordered journal, also leave one that is refused for what it is (durable.go). It succeeds
// on a full disk if Reserve did before. It fails with ErrExecID, ErrExists, ErrInconsistent, ErrTooLarge, ErrNoSpace
// (Reserve had not succeeded), and with ErrFailed from the first failed sync on: what a failed fsync leaves on disk
// is unknown and a second fsync would lie about it (fsyncgate), so the sandbox must be retired.
func (s *Store) Commit(execID string, p *Predicate, stdoutKept, stderrKept []byte, signer *Signer) (envelopeSHA string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.admit(execID, p, stdoutKept, stderrKept); err != nil {
		return "", fmt.Errorf("writing the receipt of exec %s: %w", execID, err)
	}
	c := commit{store: s}
	defer c.close()
	sha, err := c.run(execID, p, stdoutKept, stderrKept, signer)
	if err != nil {
		return "", fmt.Errorf("writing the receipt of exec %s in %s: %w", execID, s.path, err)
	}
	s.seq, s.last = p.Sequence, sha
	return sha, nil
}

func (s *Store) admit(execID string, p *Predicate, stdout, stderr []byte) error {
	if s.failed != nil {
		return s.failed
	}
	if err := CheckExecID(execID); err != nil {
		return err
	}
	if p.ExecID != execID {
		return fmt.Errorf("%w: the predicate is of exec %q", ErrInconsistent, p.ExecID)
	}
	for _, kept := range [][]byte{stdout, stderr} {
		if uint64(len(kept)) > s.outputBytes {
			return fmt.Errorf("kept output of %d bytes: %w: at most %d", len(kept), ErrTooLarge, s.outputBytes)
		}
	}
	if s.exists(FileName(execID)) {
		return ErrExists
	}
	p.Sequence, p.Previous = s.seq+1, s.last
	p.Stdout.KeptBytes, p.Stdout.KeptSHA256 = uint64(len(stdout)), hexSHA256(stdout)
	p.Stderr.KeptBytes, p.Stderr.KeptSHA256 = uint64(len(stderr)), hexSHA256(stderr)
	return p.check()
}

// commit is one Commit under way: its parts in the order in which they get their names, the receipt last.
type commit struct {
	store *Store
	parts []*part
}

func (c *commit) run(execID string, p *Predicate, stdout, stderr []byte, signer *Signer) (string, error) {
	// The output goes first, and is on its way to the disk while the receipt is signed.
	for _, o := range []*part{
		{ending: stdoutEnding, final: StdoutName(execID), data: stdout},
		{ending: stderrEnding, final: StderrName(execID), data: stderr},
	} {
		if len(o.data) == 0 {
			continue
		}
		if err := c.stage(o); err != nil {
			return "", err
		}
	}
	envelope, err := signer.Sign(*p)
	if err != nil {
		return "", err
	}
	if len(envelope) > receiptBytes {
		return "", fmt.Errorf("an envelope of %d bytes: %w: at most %d", len(envelope), ErrTooLarge, receiptBytes)
	}
	if err := c.stage(&part{ending: receiptEnding, final: FileName(execID), data: envelope}); err != nil {
		return "", err
	}
	if err := c.publish(); err != nil {
		return "", err
	}
	return hexSHA256(envelope), nil
}

// stage writes a part into its small spare, or into the large one if the small one can't grow.
func (c *commit) stage(p *part) error {
	c.parts = append(c.parts, p)
	p.fd = -1
	err := c.fill(p, false)
	if noSpace(err) {
		err = c.fill(p, true)
	}
	return err
}

func (c *commit) fill(p *part, large bool) error {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
	p.spare = spareName(p.ending, large)
	var err error
	if p.fd, err = c.store.openAt(p.spare, unix.O_WRONLY|unix.O_CREAT); err != nil {
		return fmt.Errorf("opening %s: %w", p.final, err)
	}
	c.store.ready[p.spare] = false
	if err := writeAll(p.fd, p.data, 0); err != nil {
		return fmt.Errorf("writing %s: %w", p.final, err)
	}
	if err := c.trim(p, large); err != nil {
		return fmt.Errorf("cutting %s to its size: %w", p.final, err)
	}
	if err := startWriteback(p.fd); err != nil {
		return fmt.Errorf("writing %s: %w", p.final, err)
	}
	return nil
}

// trim cuts what a spare has beyond its data: zeros of a file system that can't allocate otherwise, the rest of an
// interrupted Commit, the unused blocks of a large spare. The small spare's one block stays: cutting it would put the
// freeing of blocks on every command's path.
func (c *commit) trim(p *part, large bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(p.fd, &st); err != nil {
		return err
	}
	if !large && st.Size == int64(len(p.data)) {
		return nil
	}
	return retry(func() error { return unix.Ftruncate(p.fd, int64(len(p.data))) })
}

// publish makes the parts durable and gives them their names; durable.go says in which order, and why.
func (c *commit) publish() error {
	if c.store.oneJournal {
		if err := c.settle(); err != nil {
			return err
		}
	}
	for _, p := range c.parts {
		if err := c.rename(p); err != nil {
			return fmt.Errorf("naming %s: %w", p.final, err)
		}
	}
	if err := c.sync(); err != nil {
		return c.fail(fmt.Errorf("syncing: %w", err))
	}
	return nil
}

func (c *commit) sync() error {
	if c.store.oneJournal {
		return fsync(c.parts[len(c.parts)-1].fd)
	}
	fds := []int{c.store.dir}
	for _, p := range c.parts {
		fds = append(fds, p.fd)
	}
	return fsyncAll(fds)
}

func (c *commit) settle() error {
	for _, p := range c.parts {
		if err := awaitWriteback(p.fd); err != nil {
			return c.fail(fmt.Errorf("writing %s: %w", p.final, err))
		}
	}
	return nil
}

func (c *commit) rename(p *part) error {
	err := c.store.renameNew(p.spare, p.final, p.ending == receiptEnding)
	if !noSpace(err) {
		return err
	}
	if err := c.store.dropBallast(); err != nil {
		return err
	}
	return c.store.renameNew(p.spare, p.final, p.ending == receiptEnding)
}

// fail stops the store for good, and takes back a name that may already have been given: a receipt that may not
// outlive a power cut must not be answered from.
func (c *commit) fail(err error) error {
	p := c.parts[len(c.parts)-1]
	_ = unix.Unlinkat(c.store.dir, p.final, 0)
	c.store.failed = fmt.Errorf("%w: %w; look at the disk, and retire the sandbox", ErrFailed, err)
	return c.store.failed
}

func (c *commit) close() {
	for _, p := range c.parts {
		if p.fd >= 0 {
			unix.Close(p.fd)
		}
	}
}

// renameNew never replaces a receipt. Kept output without a receipt is debris, and may be replaced.
func (s *Store) renameNew(from, to string, receipt bool) error {
	if !receipt {
		return retry(func() error { return unix.Renameat(s.dir, from, s.dir, to) })
	}
	err := retry(func() error { return unix.Renameat2(s.dir, from, s.dir, to, unix.RENAME_NOREPLACE) })
	switch err {
	case unix.EEXIST:
		return ErrExists
	case unix.EINVAL, unix.ENOSYS:
		// The file system does not know the flag (NFS): admit looked, and nobody else writes here.
		return retry(func() error { return unix.Renameat(s.dir, from, s.dir, to) })
	}
	return err
}

func (s *Store) exists(name string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(s.dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return !errors.Is(err, unix.ENOENT)
}

func (s *Store) openAt(name string, flags int) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Openat(s.dir, name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		return err
	})
	return fd, err
}

func writeAll(fd int, b []byte, off int64) error {
	for len(b) > 0 {
		var n int
		err := retry(func() (err error) {
			n, err = unix.Pwrite(fd, b, off)
			return err
		})
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.EIO
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// openDir opens the folder itself, never what a link in its place points to.
func openDir(dir string) (fd int, err error) {
	err = retry(func() error {
		fd, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, &os.PathError{Op: "opening the receipts folder", Path: dir, Err: err}
	}
	return fd, nil
}

package vm

import (
	"fmt"
	"io"
	"os"
	"path"
)

// cpio writes an initramfs in the "newc" format (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).
type cpio struct {
	w   io.Writer
	ino int
	err error
}

func (c *cpio) entry(name string, mode, nlink int, content []byte) {
	if c.err != nil {
		return
	}
	c.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		c.ino, mode, 0, 0, nlink, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	body := append([]byte(header), name...)
	body = pad(append(body, 0))
	body = pad(append(body, content...))
	_, c.err = c.w.Write(body)
}

// pad fills up to a multiple of 4; each entry starts at one.
func pad(b []byte) []byte {
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// parents makes the folders that the names lie in, each once.
func (c *cpio) parents(names []string) {
	made := map[string]bool{".": true}
	var parent func(dir string)
	parent = func(dir string) {
		if !made[dir] {
			parent(path.Dir(dir))
			made[dir] = true
			c.dir(dir)
		}
	}
	for _, name := range names {
		parent(path.Dir(name))
	}
}

func (c *cpio) dir(name string) { c.entry(name, 0o40755, 2, nil) }

func (c *cpio) file(name string, mode int, content []byte) { c.entry(name, 0o100000|mode, 1, content) }

// copyFile adds a file of the host.
func (c *cpio) copyFile(name, source string, mode int) {
	b, err := os.ReadFile(source)
	if err != nil && c.err == nil {
		c.err = err
	}
	c.file(name, mode, b)
}

func (c *cpio) close() error {
	c.entry("TRAILER!!!", 0, 1, nil)
	return c.err
}

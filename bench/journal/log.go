//go:build log

package main

import (
	"encoding/binary"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// engineName "floor": a plain append and fdatasync with group commit, the least that any engine can cost.
const engineName = "floor"

type logEngine struct {
	mu       sync.Mutex
	syncing  sync.Mutex
	f        *os.File
	written  uint64
	durable  uint64
	syncedTo error
}

func open(dir string) (engine, error) {
	f, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &logEngine{f: f}, err
}

func (e *logEngine) Put(key string, value []byte) error {
	e.mu.Lock()
	b := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(value))
	b = append(append(b, key...), value...)
	_, err := e.f.Write(b)
	e.written++
	mine := e.written
	e.mu.Unlock()
	if err != nil {
		return err
	}
	e.syncing.Lock()
	defer e.syncing.Unlock()
	if e.durable >= mine {
		return e.syncedTo
	}
	e.mu.Lock()
	upTo := e.written
	e.mu.Unlock()
	e.syncedTo = syscall.Fdatasync(int(e.f.Fd()))
	e.durable = upTo
	return e.syncedTo
}

func (e *logEngine) Close() error { return e.f.Close() }

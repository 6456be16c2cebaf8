//go:build pebble

package main

import (
	"github.com/cockroachdb/pebble/v2"
)

const engineName = "pebble"

type pebbleEngine struct{ *pebble.DB }

func open(dir string) (engine, error) {
	cache := pebble.NewCache(1 << 20)
	defer cache.Unref()
	db, err := pebble.Open(dir, &pebble.Options{
		Cache: cache, MemTableSize: 1 << 20, MaxOpenFiles: 64,
		FormatMajorVersion: pebble.FormatNewest, Logger: quiet{},
	})
	return pebbleEngine{db}, err
}

func (e pebbleEngine) Put(key string, value []byte) error {
	return e.Set([]byte(key), value, pebble.Sync)
}

type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(string, ...any) {}

//go:build bbolt

package main

import (
	"path/filepath"

	"go.etcd.io/bbolt"
)

const engineName = "bbolt"

type boltEngine struct{ *bbolt.DB }

var bucket = []byte("journal")

func open(dir string) (engine, error) {
	db, err := bbolt.Open(filepath.Join(dir, "journal.db"), 0o600, &bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
	if err != nil {
		return nil, err
	}
	// Batch waits this long for company; the default of 10 ms would be all that is measured.
	db.MaxBatchDelay = 0
	return boltEngine{db}, db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(bucket)
		return err
	})
}

func (e boltEngine) Put(key string, value []byte) error {
	return e.Batch(func(tx *bbolt.Tx) error { return tx.Bucket(bucket).Put([]byte(key), value) })
}

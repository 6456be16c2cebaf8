//go:build sqlite

package main

import (
	"database/sql"
	"path/filepath"

	_ "modernc.org/sqlite"
)

const engineName = "sqlite"

type sqliteEngine struct {
	*group
	db *sql.DB
}

func open(dir string) (engine, error) {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(dir, "journal.db")+
		"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=cache_size(-512)")
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("CREATE TABLE kv (k TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID"); err != nil {
		return nil, err
	}
	put, err := db.Prepare("INSERT OR REPLACE INTO kv VALUES (?, ?)")
	if err != nil {
		return nil, err
	}
	return sqliteEngine{newGroup(func(batch []request) error {
		tx, err := db.Begin()
		if err != nil {
			return err
		}
		defer tx.Rollback()
		for _, r := range batch {
			if _, err := tx.Stmt(put).Exec(r.key, r.value); err != nil {
				return err
			}
		}
		return tx.Commit()
	}), db}, nil
}

func (e sqliteEngine) Close() error {
	e.stop()
	return e.db.Close()
}

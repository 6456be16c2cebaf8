//go:build zombiezen

package main

import (
	"path/filepath"

	"zombiezen.com/go/sqlite"
	"zombiezen.com/go/sqlite/sqlitex"
)

const engineName = "zombiezen"

type zombiezenEngine struct {
	*group
	conn *sqlite.Conn
}

func open(dir string) (engine, error) {
	conn, err := sqlite.OpenConn(filepath.Join(dir, "journal.db"), sqlite.OpenReadWrite, sqlite.OpenCreate, sqlite.OpenWAL)
	if err != nil {
		return nil, err
	}
	for _, q := range []string{"PRAGMA synchronous=FULL", "PRAGMA cache_size=-512", "CREATE TABLE kv (k TEXT PRIMARY KEY, v BLOB) WITHOUT ROWID"} {
		if err := sqlitex.ExecuteTransient(conn, q, nil); err != nil {
			return nil, err
		}
	}
	return zombiezenEngine{newGroup(func(batch []request) (err error) {
		defer sqlitex.Save(conn)(&err)
		for _, r := range batch {
			err := sqlitex.Execute(conn, "INSERT OR REPLACE INTO kv VALUES (?, ?)", &sqlitex.ExecOptions{Args: []any{r.key, r.value}})
			if err != nil {
				return err
			}
		}
		return nil
	}), conn}, nil
}

func (e zombiezenEngine) Close() error {
	e.stop()
	return e.conn.Close()
}

package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Record is what is kept of one sandbox's network, from before anything of it exists until all of it is gone. It is not
// synced: after a reboot only what a CNI plugin keeps on disk is left, and that is asked for by the sandbox's id.
type Record struct {
	ID   string `json:"id"`
	Mode Mode   `json:"mode"`
	// Egress is what it may reach.
	Egress Egress `json:"egress,omitzero"`
	// Namespace is the path at which the network namespace is bound.
	Namespace string `json:"namespace"`
	// Links are the node's sides of the sandbox's interfaces.
	Links []Link `json:"links,omitempty"`
	// Addresses are the sandbox's, without link-local ones.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Nameservers are those of its /etc/resolv.conf.
	Nameservers []netip.Addr `json:"nameservers,omitempty"`
	// CNI is set when CNI plugins were asked.
	CNI *CNIRecord `json:"cni,omitempty"`
	// Connected: everything of it is there.
	Connected bool `json:"connected,omitempty"`
	// Inside is how many rules there are in its own network namespace; 0 where an agent kept no number.
	Inside int `json:"inside,omitempty"`
	// CutOff is why its interfaces on the node were set down; empty: they weren't.
	CutOff string `json:"cut_off,omitempty"`
}

// Link is the node's side of an interface.
type Link struct {
	Name  string `json:"name"`
	Index int    `json:"index"`
}

// CNIRecord is what the plugins have to be told to undo what they did.
type CNIRecord struct {
	Network string `json:"network"` // the configuration's name
	File    string `json:"file"`
	// Config is the list of plugins as it was, whatever the operator has made of the file since.
	Config []byte `json:"config"`
	// Search is what else of their answer belongs into a resolv.conf: lines of it.
	Search string `json:"search,omitempty"`
	// Result is what the plugins answered.
	Result json.RawMessage `json:"result,omitempty"`
}

// unfinished ends the name of a record that is being written; an agent that is killed then leaves it.
const unfinished = "~"

type records string

func (r records) path(id string) string { return filepath.Join(string(r), id+".json") }

func (r records) write(rec *Record) error {
	if err := writeState(r.path(rec.ID), rec); err != nil {
		return fmt.Errorf("writing the network record of sandbox %s: %w", rec.ID, err)
	}
	return nil
}

// writeState writes what is kept of all sandboxes, or of one.
func writeState(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if err := os.WriteFile(path+unfinished, b, 0o600); err != nil {
		return err // names the file
	}
	return os.Rename(path+unfinished, path)
}

// readState reads what writeState wrote, if anything.
func readState(path string, v any) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err // names the file
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("reading %s: %w", path, err)
	}
	return nil
}

// read wraps ErrNotFound when there is none.
func (r records) read(id string) (*Record, error) {
	b, err := os.ReadFile(r.path(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("reading the network record of sandbox %s: %w", id, ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the network record of sandbox %s: %w", id, err)
	}
	rec := &Record{}
	if err := json.Unmarshal(b, rec); err != nil {
		return nil, fmt.Errorf("reading the network record of sandbox %s: %w", id, err)
	}
	return rec, nil
}

func (r records) remove(id string) error {
	for _, path := range []string{r.path(id) + unfinished, r.path(id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("removing the network record of sandbox %s: %w", id, err)
		}
	}
	return nil
}

// list names the sandboxes of which there is any record, also an unfinished one.
func (r records) list() ([]string, error) {
	entries, err := os.ReadDir(string(r))
	if err != nil {
		return nil, fmt.Errorf("listing networks: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutSuffix(strings.TrimSuffix(e.Name(), unfinished), ".json"); ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

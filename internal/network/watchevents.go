package network

import (
	"errors"
	"fmt"
	"strings"

	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

const (
	// tableAttribute is the table's name in every message of nftables that has one: NFTA_TABLE_NAME, NFTA_CHAIN_TABLE,
	// NFTA_RULE_TABLE, NFTA_SET_TABLE and NFTA_SET_ELEM_LIST_TABLE of linux/netfilter/nf_tables.h are all 1.
	tableAttribute = 1
	// setAttribute is the set's name in a message about elements: NFTA_SET_ELEM_LIST_SET.
	setAttribute = 2
)

// listen hears of changes of the agent's tables, this process's own among them, in the node's network namespace. A channel that is
// full has been told enough. stop ends it.
func (r *rules) listen() (heard <-chan struct{}, stop func(), err error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, nil, fmt.Errorf("listening to changes of nftables: %w", err)
	}
	if err := errors.Join(conn.SetReadBuffer(socketBuffer), conn.JoinGroup(unix.NFNLGRP_NFTABLES)); err != nil {
		conn.Close()
		return nil, nil, fmt.Errorf("listening to changes of nftables: %w", err)
	}
	told, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			msgs, err := conn.Receive()
			lost := errors.Is(err, unix.ENOBUFS)
			if err != nil && !lost {
				return // stopped; or else the ticks are left
			}
			if lost || r.changedBy(msgs) {
				select {
				case told <- struct{}{}:
				default:
				}
			}
		}
	}()
	return told, func() { conn.Close(); <-ended }, nil
}

// changedBy says whether messages tell of a change of the agent's tables that may have taken something away. Elements that are
// added have not, nor those that a sandbox's names have opened: the resolver adds and replaces them all the time, as often as a
// command asks, and a look at the rules of all sandboxes finds nothing of them.
func (r *rules) changedBy(msgs []nl.Message) bool {
	const (
		added   = nl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWSETELEM)
		removed = nl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELSETELEM)
	)
	for _, m := range msgs {
		opened := m.Header.Type == removed && isOpenSet(nameOf(m, setAttribute))
		if m.Header.Type != added && !opened && strings.HasPrefix(nameOf(m, tableAttribute), ourTables) {
			return true
		}
	}
	return false
}

// nameOf is a name that a message has; empty where there is none.
func nameOf(m nl.Message, attribute uint16) string {
	if len(m.Data) < nfgenmsgSize {
		return ""
	}
	d, err := nl.NewAttributeDecoder(m.Data[nfgenmsgSize:])
	if err != nil {
		return ""
	}
	for d.Next() {
		if d.Type() == attribute {
			return d.String()
		}
	}
	return ""
}

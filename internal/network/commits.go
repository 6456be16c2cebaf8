package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/google/nftables"
	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// commits tells the changes that this process makes to the node's nftables from everybody else's: with many sandboxes there are
// many of its own, and a look at the rules of all after each would cost the square of their number.
type commits struct {
	mu sync.Mutex
	// ours are the transactions of this process that the kernel took.
	ours uint32
}

// flush sends what has been gathered, in the node's network namespace. What is gathered changes something, or the kernel
// refuses it: a transaction of no effect would count as one, and hide somebody else's.
func (k *commits) flush(c *nftables.Conn) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	err := c.Flush()
	if err == nil {
		k.ours++
	}
	return err
}

// others is a number that changes with every transaction of somebody else, and with one of this process's whose outcome it
// doesn't know.
func (k *commits) others() (uint32, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now, err := generation(0)
	return now - k.ours, err
}

// generation is a number that the kernel raises by one with every transaction on the nftables of a network namespace
// (NFT_MSG_GETGEN): of the one that this descriptor is of, or this process's own for 0.
func generation(netns int) (uint32, error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: netns})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nftables: %w", err)
	}
	defer c.Close()
	answers, err := c.Execute(nl.Message{
		Header: nl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: nl.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0}, // struct nfgenmsg
	})
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nftables: %w", err)
	}
	for _, a := range answers {
		if len(a.Data) < nfgenmsgSize {
			continue
		}
		d, err := nl.NewAttributeDecoder(a.Data[nfgenmsgSize:])
		if err != nil {
			return 0, fmt.Errorf("reading the generation of nftables: %w", err)
		}
		d.ByteOrder = binary.BigEndian
		for d.Next() {
			if d.Type() == unix.NFTA_GEN_ID {
				return d.Uint32(), d.Err()
			}
		}
	}
	return 0, errors.New("reading the generation of nftables: it is not in the answer")
}

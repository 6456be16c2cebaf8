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
	n, err := askNFT(netns, unix.NFT_MSG_GETGEN, unix.AF_UNSPEC, nil, unix.NFTA_GEN_ID)
	if err != nil {
		return 0, fmt.Errorf("asking for the generation of nftables: %w", err)
	}
	return n, nil
}

// rulesIn is how many rules a chain has that nothing jumps to, in the network namespace of a descriptor; 0 where there is none. The
// kernel has the number: a list of more rules than expected would take minutes, and whoever may change them could have it made.
func rulesIn(netns int, t *nftables.Table, chain string) (int, error) {
	which, err := nl.MarshalAttributes([]nl.Attribute{
		{Type: unix.NFTA_CHAIN_TABLE, Data: []byte(t.Name + "\x00")}, {Type: unix.NFTA_CHAIN_NAME, Data: []byte(chain + "\x00")},
	})
	if err != nil {
		return 0, fmt.Errorf("asking for the chain %s: %w", chain, err)
	}
	n, err := askNFT(netns, unix.NFT_MSG_GETCHAIN, byte(t.Family), which, unix.NFTA_CHAIN_USE)
	if err = absent(err); err != nil {
		return 0, fmt.Errorf("asking for the chain %s: %w", chain, err)
	}
	return int(n), nil
}

// askNFT asks the nftables of a network namespace for one object, and gives a number that the answer has.
func askNFT(netns int, kind uint16, family byte, which []byte, attribute uint16) (uint32, error) {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, &nl.Config{NetNS: netns})
	if err != nil {
		return 0, err
	}
	defer c.Close()
	answers, err := c.Execute(nl.Message{
		Header: nl.Header{Type: nl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: nl.Request},
		Data:   append([]byte{family, unix.NFNETLINK_V0, 0, 0}, which...), // struct nfgenmsg
	})
	if err != nil {
		return 0, err
	}
	for _, a := range answers {
		if len(a.Data) < nfgenmsgSize {
			continue
		}
		d, err := nl.NewAttributeDecoder(a.Data[nfgenmsgSize:])
		if err != nil {
			return 0, err
		}
		d.ByteOrder = binary.BigEndian
		for d.Next() {
			if d.Type() == attribute {
				return d.Uint32(), d.Err()
			}
		}
	}
	return 0, errors.New("it is not in the answer")
}

package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables/expr"
	nl "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandbox-agent/sandbox-agent/pkg/listeners"
)

// What is refused is told over a group of the kernel's packet log (linux/netfilter/nfnetlink_log.h), which x/sys/unix lacks.
const (
	nflogPacket = unix.NFNL_SUBSYS_ULOG << 8
	nflogConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1

	nflogPayload = 9  // NFULA_PAYLOAD
	nflogPrefix  = 10 // NFULA_PREFIX

	nflogCfgCommand   = 1 // NFULA_CFG_CMD
	nflogCfgMode      = 2 // NFULA_CFG_MODE
	nflogCfgThreshold = 5 // NFULA_CFG_QTHRESH
	nflogCommandBind  = 1
	nflogCopyPacket   = 2
	nflogHeaders      = 128 // bytes of a packet: its headers
	nflogBuffer       = 1 << 20
	refusalsPerSecond = 50
	refusalsAtOnce    = 200
)

// refusalsLimit ends a rule where there are too many refusals to be told: the rest is only counted.
func refusalsLimit() expr.Any {
	return &expr.Limit{Type: expr.LimitTypePkts, Rate: refusalsPerSecond, Unit: expr.LimitTimeSecond, Burst: refusalsAtOnce}
}

// tellWhy has the headers of a packet told, with a reason of at most 127 bytes.
func tellWhy(group uint16, why string) expr.Any {
	log := &expr.Log{Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_SNAPLEN, Group: group, Snaplen: nflogHeaders}
	if why != "" {
		log.Key |= 1 << unix.NFTA_LOG_PREFIX
		log.Data = []byte(why)
	}
	return log
}

// watcher hears what is refused.
type watcher struct {
	conn  *nl.Conn
	group uint16
	heard func(source netip.Addr, destination string)

	mu sync.Mutex
	// waiting are closed when the kernel answers questions, in this order.
	waiting []chan struct{}
	closed  bool
}

// watch begins to listen to a group. The caller runs listen.
func watch(group uint16, heard func(netip.Addr, string)) (*watcher, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: reaching the packet log: %w (kernel option CONFIG_NETFILTER_NETLINK_LOG)", ErrUnavailable, err)
	}
	w := &watcher{conn: conn, group: group, heard: heard}
	// What doesn't fit is lost, and its sandbox's counter tells how much that is.
	err = errors.Join(conn.SetReadBuffer(nflogBuffer), conn.SetOption(nl.NoENOBUFS, true))
	if err == nil {
		_, err = conn.Execute(w.config([]nl.Attribute{
			{Type: nflogCfgCommand, Data: []byte{nflogCommandBind}},
			{Type: nflogCfgMode, Data: append(binary.BigEndian.AppendUint32(nil, nflogHeaders), nflogCopyPacket, 0)},
			{Type: nflogCfgThreshold, Data: binary.BigEndian.AppendUint32(nil, 1)}, // told at once
		}))
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("%w: listening to group %d of the packet log: %w (kernel option CONFIG_NETFILTER_NETLINK_LOG; who else has the group?)", ErrUnavailable, group, err)
	}
	return w, nil
}

func (w *watcher) config(attrs []nl.Attribute) nl.Message {
	data, err := nl.MarshalAttributes(attrs)
	if err != nil {
		panic(err) // attributes of a fixed size
	}
	header := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, w.group)
	return nl.Message{Header: nl.Header{Type: nflogConfig, Flags: nl.Request | nl.Acknowledge}, Data: append(header, data...)}
}

// listen hears until close.
func (w *watcher) listen() error {
	for {
		msgs, err := w.conn.Receive()
		if err != nil {
			return w.end(err)
		}
		for _, m := range msgs {
			switch {
			case m.Header.Type == nflogPacket && len(m.Data) > nfgenmsgSize:
				w.packet(m.Data[nfgenmsgSize:])
			case m.Header.Type == nl.Error:
				w.answered()
			}
		}
	}
}

const nfgenmsgSize = 4

func (w *watcher) packet(attrs []byte) {
	ad, err := nl.NewAttributeDecoder(attrs)
	if err != nil {
		return
	}
	var packet []byte
	var why string
	for ad.Next() {
		switch ad.Type() {
		case nflogPayload:
			packet = ad.Bytes()
		case nflogPrefix:
			why = ad.String()
		}
	}
	source, to, ok := headers(packet)
	if !ok {
		return
	}
	if why != "" {
		to += " (" + why + ")"
	}
	w.heard(source, to)
}

func (w *watcher) answered() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.waiting) > 0 {
		close(w.waiting[0])
		w.waiting = w.waiting[1:]
	}
}

// end lets go of everybody who waits; the error is nil after close.
func (w *watcher) end(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.waiting {
		close(c)
	}
	w.waiting = nil
	if w.closed {
		return nil
	}
	w.closed = true
	return fmt.Errorf("listening to refused connections: %w", err)
}

// settle waits until everything that was refused before has been heard: the kernel's answer to a question comes after it, on
// the same socket.
func (w *watcher) settle(ctx context.Context) error {
	c := make(chan struct{})
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	if _, err := w.conn.Send(w.config([]nl.Attribute{{Type: nflogCfgThreshold, Data: binary.BigEndian.AppendUint32(nil, 1)}})); err != nil {
		w.mu.Unlock()
		return fmt.Errorf("asking the packet log: %w", err)
	}
	w.waiting = append(w.waiting, c)
	w.mu.Unlock()
	select {
	case <-c:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *watcher) close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	return w.conn.Close()
}

// headers reads where a packet comes from and leads to: ADDRESS:PORT/PROTOCOL, or ADDRESS/PROTOCOL without ports.
func headers(b []byte) (source netip.Addr, to string, ok bool) {
	var proto byte
	var destination netip.Addr
	var rest []byte
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		size := int(b[0]&0xf) * 4
		if size < 20 || len(b) < size {
			return source, "", false
		}
		proto, rest = b[9], b[size:]
		source, destination = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case len(b) >= 40 && b[0]>>4 == 6:
		proto, rest = b[6], b[40:] // one with extension headers is told by its address
		source, destination = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	default:
		return source, "", false
	}
	names := map[byte]string{listeners.TCP: "tcp", listeners.UDP: "udp", listeners.ICMP: "icmp", listeners.ICMPv6: "icmp"}
	name := names[proto]
	if name == "" {
		name = fmt.Sprintf("protocol %d", proto)
	}
	if (proto == listeners.TCP || proto == listeners.UDP) && len(rest) >= 4 {
		return source, netip.AddrPortFrom(destination, binary.BigEndian.Uint16(rest[2:])).String() + "/" + name, true
	}
	return source, destination.String() + "/" + name, true
}

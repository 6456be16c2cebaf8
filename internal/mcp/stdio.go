package mcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

const (
	// maxMessage bounds one message of the caller's, bytes: the longest command with each of its bytes written as \u0001,
	// and as much again around it.
	maxMessage = 2 << 20
	// maxNumberID is the largest number that is the same in every JSON implementation (RFC 8259, section 6).
	maxNumberID = 1 << 53
	callMethod  = "tools/call"
	// requestKey is where the connection tells the tool the request's id: a key of _meta that no caller can set.
	requestKey = "sandbox-agent/request"
)

// stdio is a connection of JSON-RPC messages, one a line. A line that is no message is answered, and the next one read:
// one bad line must not end a session in which a command runs. What is too long is skipped and never held in memory.
type stdio struct {
	log   *slog.Logger
	lines chan line
	// ended is closed when the caller's end of the input is.
	ended  chan struct{}
	closed chan struct{}
	once   sync.Once

	mu  sync.Mutex // guards writes
	out io.Writer

	openMu sync.Mutex
	open   map[jsonrpc.ID]bool // calls of the tool that are not answered
	less   chan struct{}       // told when there are fewer
}

// line is one line of the input. The id is only known of one that was too long.
type line struct {
	text []byte
	id   json.RawMessage
	err  *jsonrpc.Error
}

func newStdio(in io.Reader, out io.Writer, log *slog.Logger) *stdio {
	c := &stdio{
		log: log, out: out, lines: make(chan line), ended: make(chan struct{}), closed: make(chan struct{}),
		open: map[jsonrpc.ID]bool{}, less: make(chan struct{}, 1),
	}
	// A goroutine of its own, because nothing interrupts a read of standard input: it stays in one until the process ends.
	go c.read(bufio.NewReaderSize(in, 64<<10))
	return c
}

// Connect makes it the SDK's transport.
func (c *stdio) Connect(context.Context) (sdk.Connection, error) { return c, nil }

func (c *stdio) read(in *bufio.Reader) {
	defer close(c.ended)
	for {
		l, err := readLine(in)
		if len(l.text) > 0 || l.err != nil {
			select {
			case c.lines <- l:
			case <-c.closed:
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				c.log.Warn("reading standard input", "error", err)
			}
			return
		}
	}
}

// readLine reads to the end of a line. Of one that is too long only the id is kept.
func readLine(in *bufio.Reader) (line, error) {
	var l line
	var ids idScanner
	for {
		part, err := in.ReadSlice('\n')
		if l.err == nil && len(l.text)+len(part) > maxMessage {
			l.err = &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: fmt.Sprintf("the message has more than %d bytes: nothing ran", maxMessage)}
			ids.feed(l.text)
			l.text = nil
		}
		if l.err != nil {
			ids.feed(part)
		} else {
			l.text = append(l.text, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		l.id, l.text = ids.id(), bytes.TrimSpace(l.text)
		return l, err
	}
}

// Read gives the next message; lines that are none are answered.
func (c *stdio) Read(ctx context.Context) (jsonrpc.Message, error) {
	for {
		select {
		case l := <-c.lines:
			msg, id, fault := l.message()
			if fault == nil && msg != nil {
				c.note(msg)
				return msg, nil
			}
			if fault != nil {
				c.log.Warn("refused a message", "id", string(id), "error", fault.Message)
				if err := c.refuse(id, fault); err != nil {
					return nil, err
				}
			}
		case <-c.ended:
			return nil, io.EOF
		case <-c.closed:
			return nil, io.EOF
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// message is the line as a message. Without one and without a fault there is nothing to do and nobody to answer.
func (l line) message() (jsonrpc.Message, json.RawMessage, *jsonrpc.Error) {
	invalid := func(id json.RawMessage, format string, args ...any) (jsonrpc.Message, json.RawMessage, *jsonrpc.Error) {
		return nil, id, &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case l.err != nil:
		return nil, l.id, l.err
	case !utf8.Valid(l.text) || !json.Valid(l.text):
		return nil, nil, &jsonrpc.Error{Code: jsonrpc.CodeParseError, Message: "the line is no JSON in UTF-8"}
	case l.text[0] == '[':
		return invalid(nil, "batches are not taken: send one message a line")
	}
	var ids idScanner
	ids.feed(l.text)
	id := ids.id()
	if !usableID(id) {
		return invalid(nil, "the id is neither a string nor a whole number of at most 2^53")
	}
	msg, err := jsonrpc.DecodeMessage(l.text)
	if err != nil {
		return invalid(id, "no JSON-RPC 2.0 message: %v", err)
	}
	req, ok := msg.(*jsonrpc.Request)
	if !ok || req.Method != callMethod {
		return msg, id, nil
	}
	if !req.IsCall() {
		return nil, nil, nil // a notification: nothing could be answered, so nothing is run
	}
	if req.Params, err = withRequestID(req.Params, req.ID); err != nil {
		return nil, id, &jsonrpc.Error{Code: jsonrpc.CodeInvalidParams, Message: err.Error()}
	}
	return req, id, nil
}

// usableID says whether an id is one that nothing on its way changes. No id, or null, is a notification's.
func usableID(id json.RawMessage) bool {
	if len(id) == 0 || string(id) == "null" || id[0] == '"' {
		return true
	}
	var n json.Number
	if json.Unmarshal(id, &n) != nil {
		return false
	}
	i, err := n.Int64()
	return err == nil && -maxNumberID <= i && i <= maxNumberID
}

// withRequestID writes the request's id into the params' _meta, over whatever the caller has there: as JSON, so that the
// number 1 and the string "1" are two.
func withRequestID(params json.RawMessage, id jsonrpc.ID) (json.RawMessage, error) {
	p, meta := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	if err := json.Unmarshal(params, &p); err != nil || p == nil {
		return nil, errors.New("params is no object")
	}
	if raw, ok := p["_meta"]; ok {
		if err := json.Unmarshal(raw, &meta); err != nil || meta == nil {
			return nil, errors.New("params._meta is no object")
		}
	}
	text, err := json.Marshal(id.Raw())
	if err != nil {
		return nil, err
	}
	if meta[requestKey], err = json.Marshal(string(text)); err != nil {
		return nil, err
	}
	if p["_meta"], err = json.Marshal(meta); err != nil {
		return nil, err
	}
	return json.Marshal(p)
}

// refuse answers what never became a request. Without an id it is null (JSON-RPC 2.0, section 5).
func (c *stdio) refuse(id json.RawMessage, fault *jsonrpc.Error) error {
	if len(id) == 0 {
		id = json.RawMessage("null")
	}
	b, err := json.Marshal(struct {
		Version string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   *jsonrpc.Error  `json:"error"`
	}{"2.0", id, fault})
	if err != nil {
		return err
	}
	return c.write(b)
}

// Write sends one message.
func (c *stdio) Write(ctx context.Context, msg jsonrpc.Message) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	b, err := jsonrpc.EncodeMessage(msg)
	if err != nil {
		return fmt.Errorf("encoding a message: %w", err)
	}
	defer c.answered(msg)
	return c.write(b)
}

func (c *stdio) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.out.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("writing to the caller: %w", err)
	}
	return nil
}

// note remembers a call of the tool until it is answered.
func (c *stdio) note(msg jsonrpc.Message) {
	if req, ok := msg.(*jsonrpc.Request); ok && req.Method == callMethod {
		c.openMu.Lock()
		defer c.openMu.Unlock()
		c.open[req.ID] = true
	}
}

func (c *stdio) answered(msg jsonrpc.Message) {
	r, ok := msg.(*jsonrpc.Response)
	if !ok {
		return
	}
	c.openMu.Lock()
	defer c.openMu.Unlock()
	delete(c.open, r.ID)
	select {
	case c.less <- struct{}{}:
	default:
	}
}

// quiet waits until every call of the tool that was read is answered.
func (c *stdio) quiet(ctx context.Context) error {
	for {
		c.openMu.Lock()
		n := len(c.open)
		c.openMu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-c.less:
		case <-ctx.Done():
			return fmt.Errorf("the caller does not read the answers of %d calls: %w", n, ctx.Err())
		}
	}
}

// Close ends Read. The input and the output are the process's own and stay open.
func (c *stdio) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// SessionID is empty: one connection is one MCP session.
func (c *stdio) SessionID() string { return "" }

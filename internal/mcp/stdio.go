package mcp

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
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
	maxNumberID  = 1 << 53
	callMethod   = "tools/call"
	initMethod   = "initialize"
	cancelMethod = "notifications/cancelled"
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
	open   map[jsonrpc.ID]*pending // requests that are not answered
	less   chan struct{}           // told when there are fewer
}

// pending is a request that is not answered.
type pending struct {
	method string
	// same is of method and params: the request delivered again has the same.
	same [sha256.Size]byte
	// owed counts the answers that the caller waits for and that nobody writes yet: none once it has cancelled, one more
	// for each time that it delivered the request.
	owed int
	// writing: an answer is being written.
	writing bool
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
		open: map[jsonrpc.ID]*pending{}, less: make(chan struct{}, 1),
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
				var take bool
				if take, fault = c.note(msg); take {
					return msg, nil
				}
				id = nil // its answer must not pass for that of the request that has the id
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
	h, twice := examine(l.text)
	switch {
	case h.ids > 1 || !usableID(h.id):
		return invalid(nil, "the id is neither a string nor a whole number of at most 2^53, or is there twice")
	case twice != "":
		return invalid(h.id, "the member %q is there twice: nothing ran", clip(twice))
	case string(h.id) == "null" && h.method:
		return invalid(nil, "the id is null: nothing ran; a request has a string or a number, a notification has none")
	}
	id := h.id
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

// usableID says whether an id is one that nothing on its way changes. A notification has none.
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

// Write sends one message. An answer is sent as often as its request was delivered, and not at all when that was cancelled.
func (c *stdio) Write(ctx context.Context, msg jsonrpc.Message) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r, ok := msg.(*jsonrpc.Response)
	if ok {
		r.Error = coded(r.Error)
	}
	b, err := jsonrpc.EncodeMessage(msg)
	if err != nil {
		err = fmt.Errorf("encoding a message: %w", err)
	}
	switch {
	case ok:
		return c.answers(r.ID, b, err)
	case err != nil:
		return err
	}
	return c.write(b)
}

// answers writes an answer as often as it is owed: once more, too, for each time that the request was delivered while it was
// written. With an error, or after one, nobody is owed it any more.
func (c *stdio) answers(id jsonrpc.ID, b []byte, err error) error {
	p := c.pendingOf(id)
	for c.takeOwed(id, p, err != nil) {
		err = c.write(b)
	}
	return err
}

// coded gives an error a code that has none: such errors are the SDK's, about requests that can't be handled, for example
// before the handshake.
func coded(err error) error {
	if e, ok := errors.AsType[*jsonrpc.Error](err); err == nil || ok && e.Code != 0 {
		return err
	}
	return &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: err.Error()}
}

func (c *stdio) write(b []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, err := c.out.Write(append(b[:len(b):len(b)], '\n')); err != nil {
		return fmt.Errorf("writing to the caller: %w", err)
	}
	return nil
}

// note remembers a request until it is answered, and says whether the message is to be handled. A request that is delivered
// again while it runs is not: it gets the same answer, when there is one. Another one with that id is refused.
func (c *stdio) note(msg jsonrpc.Message) (take bool, fault *jsonrpc.Error) {
	req, ok := msg.(*jsonrpc.Request)
	if !ok {
		return true, nil
	}
	if !req.IsCall() {
		return req.Method != cancelMethod || c.cancelled(req.Params), nil
	}
	same := sha256.Sum256(slices.Concat([]byte(req.Method), []byte{0}, req.Params))
	c.openMu.Lock()
	defer c.openMu.Unlock()
	p := c.open[req.ID]
	switch {
	// A caller that has read the answer may use its id again, before the write of the answer has returned here.
	case p == nil, p.same != same && p.writing && p.owed == 0:
		c.open[req.ID] = &pending{method: req.Method, same: same, owed: 1}
		return true, nil
	case p.same == same:
		p.owed++
		return false, nil
	}
	text, _ := json.Marshal(req.ID.Raw()) // a string or a number
	return false, &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: fmt.Sprintf(
		"the id %s is that of a request that runs: the second one, which is another, did not run; each request needs an id of its own", clip(string(text)))}
}

// cancelled notes that the caller wants no answer any more (MCP, cancellation). It says whether the id can be one.
func (c *stdio) cancelled(params json.RawMessage) bool {
	var p map[string]json.RawMessage
	if err := json.Unmarshal(params, &p); err != nil || !usableID(p["requestId"]) {
		c.log.Warn("ignored a cancel without the id of a request")
		return false
	}
	var raw any
	_ = json.Unmarshal(p["requestId"], &raw) // it is one of a valid message
	id, err := jsonrpc.MakeID(raw)
	c.openMu.Lock()
	defer c.openMu.Unlock()
	if open := c.open[id]; err == nil && open != nil && open.method != initMethod { // which can't be cancelled
		open.owed = 0
	}
	return true
}

// pendingOf is the request that is answered. The answer to one that was not noted is sent once.
func (c *stdio) pendingOf(id jsonrpc.ID) *pending {
	c.openMu.Lock()
	defer c.openMu.Unlock()
	p := c.open[id]
	switch {
	case p == nil:
		p = &pending{owed: 1}
	case p.owed == 0:
		c.log.Info("not answered, for it was cancelled", "method", p.method)
	}
	return p
}

// takeOwed takes one of the answers that are owed, which is then to be written. Where there is none, or no more is to be
// written, the request is forgotten, under the same lock: whoever delivers it after that is not owed its answer.
func (c *stdio) takeOwed(id jsonrpc.ID, p *pending, end bool) bool {
	c.openMu.Lock()
	defer c.openMu.Unlock()
	if p.owed > 0 && !end {
		p.owed--
		p.writing = true
		return true
	}
	if c.open[id] == p {
		delete(c.open, id)
	}
	select {
	case c.less <- struct{}{}:
	default:
	}
	return false
}

// openCalls counts the calls of the tool whose answer somebody waits for.
func (c *stdio) openCalls() int {
	c.openMu.Lock()
	defer c.openMu.Unlock()
	n := 0
	for _, p := range c.open {
		if p.method == callMethod && (p.owed > 0 || p.writing) {
			n++
		}
	}
	return n
}

// quiet waits until every call of the tool that was read is answered.
func (c *stdio) quiet(ctx context.Context) error {
	for {
		n := c.openCalls()
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

package mcp

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// overStdio gives what Read makes of an input, and what was answered to the rest.
func overStdio(t *testing.T, in io.Reader) (read []*jsonrpc.Request, answered []string) {
	t.Helper()
	var out bytes.Buffer
	c := newStdio(in, &out, slog.New(slog.DiscardHandler))
	defer c.Close()
	for {
		msg, err := c.Read(t.Context())
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		read = append(read, msg.(*jsonrpc.Request))
	}
	if out.Len() == 0 {
		return read, nil
	}
	return read, strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
}

func TestALineThatIsNoMessageIsAnsweredAndTheNextOneRead(t *testing.T) {
	const ping = `{"jsonrpc":"2.0","id":"after","method":"ping"}`
	for in, want := range map[string]string{
		`{`:                                     `{"jsonrpc":"2.0","id":null,"error":{"code":-32700`,
		`nonsense`:                              `"code":-32700`,
		"{\"jsonrpc\":\"2.0\",\"id\":\"\xff\"}": `"code":-32700`,
		`{"jsonrpc":"2.0","id":1,"method":"ping"} {"jsonrpc":"2.0","id":2,"method":"ping"}`: `"code":-32700`,
		`[{"jsonrpc":"2.0","id":1,"method":"ping"}]`:                                        `"code":-32600,"message":"batches`,
		`{"jsonrpc":"1.0","id":7,"method":"ping"}`:                                          `{"jsonrpc":"2.0","id":7,"error":{"code":-32600`,
		`{"jsonrpc":"2.0","id":1.5,"method":"ping"}`:                                        `"id":null,"error":{"code":-32600,"message":"the id`,
		`{"jsonrpc":"2.0","id":9007199254740993,"method":"ping"}`:                           `"code":-32600,"message":"the id`,
		`{"jsonrpc":"2.0","id":{},"method":"ping"}`:                                         `"code":-32600`,
		`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":[]}`:                        `{"jsonrpc":"2.0","id":5,"error":{"code":-32602,"message":"params is no object"`,
		`{"jsonrpc":"2.0","id":5,"method":"tools/call"}`:                                    `"code":-32602`,
		`{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"_meta":1}}`:               `"code":-32602,"message":"params._meta is no object"`,
		`7`: `"code":-32600`,
		`{"jsonrpc":"2.0","id":null,"method":"ping"}`:                                                             `"id":null,"error":{"code":-32600,"message":"the id is null`,
		`{"jsonrpc":"2.0","\u0069d":1.5,"method":"ping"}`:                                                         `"id":null,"error":{"code":-32600,"message":"the id is neither`,
		`{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}`:                                                         `"id":null,"error":{"code":-32600,"message":"the id is neither`,
		`{"jsonrpc":"2.0","a":1,"a":1,"id":1,"\u0069\u0064":2,"method":"ping"}`:                                   `"id":null,"error":{"code":-32600,"message":"the id is neither`,
		`{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/call"}`:                                          `{"jsonrpc":"2.0","id":1,"error":{"code":-32600,"message":"the member \"method\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"ping","m\u0065thod":"tools/call"}`:                                     `the member \"method\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"ping","params":{},"params":{}}`:                                        `the member \"params\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bash","name":"sh"}}`:                     `the member \"name\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"arguments":{},"arguments":{"command":"x"}}}`:    `the member \"arguments\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"_meta":{"progressToken":1,"progressToken":2}}}`: `the member \"progressToken\" is there twice`,
		`{"jsonrpc":"2.0","id":1,"method":"ping","params":[{"a":[{"b":1,"b":2}]}]}`:                               `the member \"b\" is there twice`,
		`{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1,"requestId":2}}`:             `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"the member \"requestId\" is there twice`,
	} {
		read, answered := overStdio(t, strings.NewReader(in+"\n"+ping+"\n"))
		require.Len(t, answered, 1, in)
		require.Contains(t, answered[0], want, in)
		require.True(t, json.Valid([]byte(answered[0])))
		require.Len(t, read, 1, in)
		require.Equal(t, "after", read[0].ID.Raw())
	}
}

func TestEmptyLinesAndNotificationsOfCallsAreNothing(t *testing.T) {
	read, answered := overStdio(t, strings.NewReader("\n \r\n"+`{"jsonrpc":"2.0","method":"tools/call","params":{"name":"bash","arguments":{"command":"x"}}}`+"\n"))
	require.Empty(t, read)
	require.Empty(t, answered)
	read, _ = overStdio(t, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))
	require.Len(t, read, 1, "the last line needs no newline")
}

// endless is a line without an end in sight: a reader that held it would show in the test's memory.
type endless struct {
	left int64
	head string
	tail string
}

func (e *endless) Read(b []byte) (int, error) {
	switch {
	case e.head != "":
		n := copy(b, e.head)
		e.head = e.head[n:]
		return n, nil
	case e.left > 0:
		n := int(min(int64(len(b)), e.left))
		for i := range b[:n] {
			b[i] = 'x'
		}
		e.left -= int64(n)
		return n, nil
	case e.tail != "":
		n := copy(b, e.tail)
		e.tail = e.tail[n:]
		return n, nil
	}
	return 0, io.EOF
}

func TestAMessageThatIsTooLongIsSkippedAndItsCallerAnswered(t *testing.T) {
	for name, e := range map[string]*endless{
		"id before":             {left: 64 << 20, head: `{"jsonrpc":"2.0","id":"mine","method":"tools/call","params":{"arguments":{"command":"`, tail: `"}}}` + "\n"},
		"id written in escapes": {left: 3 << 20, head: `{"params":{"arguments":{"command":"`, tail: `"}},"\u0069\u0064":"mine"}` + "\n"},
		"id after":              {left: 3 << 20, head: `{"params":{"id":"other","arguments":{"command":"\"id\":\"other\"`, tail: `"}},"id":"mine"}` + "\n"},
	} {
		e.tail += `{"jsonrpc":"2.0","id":1,"method":"ping"}` + "\n"
		read, answered := overStdio(t, e)
		require.Len(t, answered, 1, name)
		require.Contains(t, answered[0], `"id":"mine","error":{"code":-32600,"message":"the message has more than`, name)
		require.Len(t, read, 1, name)
	}
}

func TestAMessageThatIsTooLongWithTwoIDsIsAnsweredToNeither(t *testing.T) {
	e := &endless{left: 3 << 20, head: `{"id":1,"params":"`, tail: `","i\u0064":2}` + "\n"}
	_, answered := overStdio(t, e)
	require.Len(t, answered, 1)
	require.Contains(t, answered[0], `"id":null,"error":{"code":-32600,"message":"the message has more than`)
}

// What arguments the tool gets twice, the tool says in words (TestArgumentsThatAreNotTheToolsAreRefusedInWords).
func TestTheToolsArgumentsComeToTheTool(t *testing.T) {
	const in = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bash","arguments":{"command":"a","command":"b"}}}`
	read, answered := overStdio(t, strings.NewReader(in+"\n"))
	require.Empty(t, answered)
	require.Len(t, read, 1)
	require.Contains(t, string(read[0].Params), `{"command":"a","command":"b"}`)
}

// conversation is a connection whose input the test has written before, and whose output it reads.
func conversation(t *testing.T, in ...string) (c *stdio, out *bytes.Buffer) {
	t.Helper()
	out = &bytes.Buffer{}
	c = newStdio(strings.NewReader(strings.Join(in, "\n")+"\n"), out, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { c.Close() })
	return c, out
}

// readAll gives the messages that are to be handled.
func (c *stdio) readAll(t *testing.T) (read []*jsonrpc.Request) {
	t.Helper()
	for {
		msg, err := c.Read(t.Context())
		if err == io.EOF {
			return read
		}
		require.NoError(t, err)
		read = append(read, msg.(*jsonrpc.Request))
	}
}

func (c *stdio) answer(t *testing.T, id any, err error) {
	t.Helper()
	i, fault := jsonrpc.MakeID(id)
	require.NoError(t, fault)
	require.NoError(t, c.Write(t.Context(), &jsonrpc.Response{ID: i, Result: json.RawMessage(`{"of":"it"}`), Error: err}))
}

const (
	aCall     = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bash","arguments":{"command":"x"}}}`
	anAnswer  = `{"jsonrpc":"2.0","id":1,"result":{"of":"it"}}` + "\n"
	aCancel   = `{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}`
	otherCall = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bash","arguments":{"command":"y"}}}`
)

func TestP7ARequestDeliveredAgainWhileItRunsIsHandledOnceAndAnsweredEachTime(t *testing.T) {
	spaced := strings.ReplaceAll(aCall, `:`, ` : `)
	c, out := conversation(t, aCall, aCall, spaced)
	require.Len(t, c.readAll(t), 1)
	require.Empty(t, out.String(), "there is no answer yet")
	c.answer(t, 1.0, nil)
	require.Equal(t, strings.Repeat(anAnswer, 3), out.String())

	c, out = conversation(t, aCall, strings.Replace(aCall, `"id":1`, `"id":"1"`, 1))
	require.Len(t, c.readAll(t), 2, "the control case: another id is another request")
	c.answer(t, 1.0, nil)
	require.Equal(t, anAnswer, out.String())
}

// held is an output whose first write waits until the test lets it go on.
type held struct {
	bytes.Buffer
	once           sync.Once
	begun, proceed chan struct{}
}

func (h *held) Write(b []byte) (int, error) {
	h.once.Do(func() {
		close(h.begun)
		<-h.proceed
	})
	return h.Buffer.Write(b)
}

// answering is a conversation in which the answer to aCall is being written.
func answering(t *testing.T) (c *stdio, out *held, feed *io.PipeWriter, wrote chan error) {
	t.Helper()
	in, feed := io.Pipe()
	out = &held{begun: make(chan struct{}), proceed: make(chan struct{})}
	c = newStdio(in, out, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { c.Close() })
	go io.WriteString(feed, aCall+"\n")
	_, err := c.Read(t.Context())
	require.NoError(t, err)
	wrote = make(chan error, 1)
	go func() {
		id, _ := jsonrpc.MakeID(1.0)
		wrote <- c.Write(t.Context(), &jsonrpc.Response{ID: id, Result: json.RawMessage(`{"of":"it"}`)})
	}()
	<-out.begun
	return c, out, feed, wrote
}

func TestP7ARequestDeliveredAgainWhileItsAnswerIsWrittenIsAnsweredAgain(t *testing.T) {
	for name, x := range map[string]struct {
		during  []string
		answers int
	}{
		"the control case":                {nil, 1},
		"delivered again":                 {[]string{aCall}, 2},
		"delivered twice more":            {[]string{aCall, aCall}, 3},
		"cancelled, which is too late":    {[]string{aCancel}, 1},
		"delivered again, then cancelled": {[]string{aCall, aCancel}, 1},
		"cancelled, then delivered again": {[]string{aCancel, aCall}, 2},
	} {
		c, out, feed, wrote := answering(t)
		require.Equal(t, 1, c.openCalls(), "%s: nobody has the answer yet", name)
		go func() {
			io.WriteString(feed, strings.Join(append(x.during, ""), "\n"))
			feed.Close()
		}()
		for _, msg := range c.readAll(t) {
			require.Equal(t, cancelMethod, msg.Method, "%s: it runs once", name)
		}
		close(out.proceed)
		require.NoError(t, <-wrote)
		require.Equal(t, strings.Repeat(anAnswer, x.answers), out.String(), name)
		require.NoError(t, c.quiet(t.Context()), name)
		require.Empty(t, c.open, name)
	}
}

func TestP7AnotherRequestWithAnIDThatIsInUseIsRefusedAndNotTakenForTheFirst(t *testing.T) {
	c, out := conversation(t, aCall, otherCall, `{"jsonrpc":"2.0","id":1,"method":"ping"}`)
	read := c.readAll(t)
	require.Len(t, read, 1)
	require.Contains(t, string(read[0].Params), `"command":"x"`)
	for line := range strings.Lines(out.String()) {
		require.Contains(t, line, `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"the id 1 is that of a request that runs`)
	}
	require.Equal(t, 2, strings.Count(out.String(), "\n"))
	out.Reset()
	c.answer(t, 1.0, nil)
	require.Equal(t, anAnswer, out.String(), "the first one is answered once")
}

// A caller may use an id again as soon as it has read the answer, which is before the write of it returns here.
func TestAnIDMayBeUsedAgainOnceItsAnswerIsWritten(t *testing.T) {
	c, out, _, wrote := answering(t)
	other, err := jsonrpc.DecodeMessage([]byte(otherCall))
	require.NoError(t, err)
	take, fault := c.note(other)
	require.True(t, take, fault)
	close(out.proceed)
	require.NoError(t, <-wrote)
	require.Equal(t, 1, c.openCalls(), "and its answer is waited for")
	id, _ := jsonrpc.MakeID(1.0)
	require.NoError(t, c.Write(t.Context(), &jsonrpc.Response{ID: id, Result: json.RawMessage(`{"of":"other"}`)}))
	require.Equal(t, anAnswer+strings.Replace(anAnswer, `"it"`, `"other"`, 1), out.String())
	require.NoError(t, c.quiet(t.Context()))
	require.Empty(t, c.open)
}

func TestACancelledRequestIsNotAnswered(t *testing.T) {
	for name, x := range map[string]struct {
		in      []string
		answers int
	}{
		"the control case":                {[]string{aCall}, 1},
		"cancelled":                       {[]string{aCall, aCancel}, 0},
		"delivered twice, then cancelled": {[]string{aCall, aCall, aCancel}, 0},
		"delivered again after it":        {[]string{aCall, aCancel, aCall}, 1},
		"another one is cancelled":        {[]string{aCall, strings.Replace(aCancel, `:1`, `:2`, 1)}, 1},
		"one of another type":             {[]string{aCall, strings.Replace(aCancel, `:1`, `:"1"`, 1)}, 1},
		"no id of a request":              {[]string{aCall, strings.Replace(aCancel, `:1`, `:1.5`, 1)}, 1},
		"before it is sent":               {[]string{aCancel, aCall}, 1},
	} {
		c, out := conversation(t, x.in...)
		c.readAll(t)
		c.answer(t, 1.0, nil)
		require.Equal(t, strings.Repeat(anAnswer, x.answers), out.String(), name)
		require.NoError(t, c.quiet(t.Context()), name)
	}
	c, out := conversation(t, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}`, aCancel)
	c.readAll(t)
	c.answer(t, 1.0, nil)
	require.Equal(t, anAnswer, out.String(), "the handshake can't be cancelled")
}

func TestACancelWithoutTheIDOfARequestCancelsNothing(t *testing.T) {
	c, _ := conversation(t, aCall, strings.Replace(aCancel, `:1`, `:1.5`, 1), aCancel)
	read := c.readAll(t)
	require.Len(t, read, 2, "the SDK would take 1.5 for 1")
	require.JSONEq(t, `{"requestId":1}`, string(read[1].Params))
}

func TestEveryErrorHasACode(t *testing.T) {
	for _, x := range []struct {
		err  error
		code int
	}{
		{errors.New("too early"), -32600}, {&jsonrpc.Error{Message: "x"}, -32600}, {&jsonrpc.Error{Code: -32601, Message: "x"}, -32601},
		{fmt.Errorf("around: %w", &jsonrpc.Error{Code: -32602, Message: "x"}), -32602},
	} {
		c, out := conversation(t)
		c.answer(t, 1.0, x.err)
		require.Contains(t, out.String(), fmt.Sprintf(`"error":{"code":%d,"message":%q}`, x.code, x.err.Error()))
	}
}

func TestNoCallerSetsTheRequestsID(t *testing.T) {
	for in, want := range map[string]string{
		`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"bash"}}`:                                           `1`,
		`{"jsonrpc":"2.0","id":"1","method":"tools/call","params":{"_meta":{"progressToken":5}}}`:                           `"1"`,
		`{"jsonrpc":"2.0","id":-3,"method":"tools/call","params":{"_meta":{"sandbox-agent/request":"99"}}}`:                 `-3`,
		`{"jsonrpc":"2.0","\u0069d":4,"method":"tools/call","params":{"_meta":{"sandbox-agent/request":"99","other":[1]}}}`: `4`,
	} {
		read, answered := overStdio(t, strings.NewReader(in+"\n"))
		require.Empty(t, answered, in)
		require.Len(t, read, 1)
		var p struct {
			Meta map[string]any `json:"_meta"`
		}
		require.NoError(t, json.Unmarshal(read[0].Params, &p))
		require.Equal(t, want, p.Meta[requestKey], in)
	}
}

func TestExecIDsOfRequestsAndOfProcessesDiffer(t *testing.T) {
	a, b := New(Options{Log: slog.New(slog.DiscardHandler)}), New(Options{Log: slog.New(slog.DiscardHandler)})
	seen := map[string]bool{}
	for _, s := range []*Server{a, b} {
		for _, request := range []string{`1`, `"1"`, `-1`, `"n1"`, `""`, `"` + strings.Repeat("x", 5000) + `"`} {
			id, err := s.execID(map[string]any{requestKey: request})
			require.NoError(t, err)
			require.Regexp(t, `^mcp-[0-9a-f]{16}-[ns][0-9a-f-]+$`, id)
			require.False(t, seen[id], id)
			seen[id] = true
			again, err := s.execID(map[string]any{requestKey: request})
			require.NoError(t, err)
			require.Equal(t, id, again)
		}
	}
	_, err := a.execID(nil)
	require.ErrorContains(t, err, "no id")
}

// The scanner finds what the decoder finds, in any JSON object, however it is cut into pieces.
func TestTheScannerFindsTheIDOfAnyObject(t *testing.T) {
	value := rapid.Custom(func(t *rapid.T) any {
		return rapid.OneOf(
			rapid.Map(rapid.StringOf(rapid.RuneFrom([]rune(`ab"\{}[]:, é`))), func(s string) any { return s }),
			rapid.Map(rapid.IntRange(-5, 5), func(n int) any { return n }),
			rapid.Just[any](nil), rapid.Just[any](map[string]any{"id": "deep", "a": []any{"id", map[string]any{"id": 1}}}),
		).Draw(t, "value")
	})
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.MapOf(rapid.SampledFrom([]string{"id", "ID", "method", "params", `i"d`, "idx", ""}), value).Draw(t, "object")
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var s idScanner
		for rest := text; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "piece")
			s.feed(rest[:n])
			rest = rest[n:]
		}
		want := ""
		if id, ok := m["id"]; ok {
			if _, isMap := id.(map[string]any); !isMap {
				b, _ := json.Marshal(id)
				want = string(b)
			}
		}
		if got := string(s.id()); got != want {
			t.Fatalf("%s: found %q, not %q", text, got, want)
		}
	})
}

func FuzzTheScanner(f *testing.F) {
	f.Add([]byte(`{"id":1}`))
	f.Add([]byte(`{"a":"\"","id":"x"`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s idScanner
		s.feed(b)
		if id := s.id(); id != nil && !json.Valid(id) {
			t.Fatalf("%q", id)
		}
	})
}

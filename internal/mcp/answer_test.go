package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func infoOf(b []byte) *sandboxv1.OutputInfo {
	sum := sha256.Sum256(b)
	return &sandboxv1.OutputInfo{Bytes: uint64(len(b)), Sha256: hex.EncodeToString(sum[:])}
}

func ended(status sandboxv1.ExecResult_Status, stdout string) *sandboxv1.ExecResult {
	return &sandboxv1.ExecResult{
		ExecId: "e", Status: status, Stdout: []byte(stdout), StdoutInfo: infoOf([]byte(stdout)), StderrInfo: infoOf(nil),
		Duration: durationpb.New(1500 * time.Millisecond),
	}
}

func texts(r *sdk.CallToolResult) []string {
	var out []string
	for _, c := range r.Content {
		out = append(out, c.(*sdk.TextContent).Text)
	}
	return out
}

// structuredOf is the structured content as a caller gets it, checked against the tool's schema.
func structuredOf(t *testing.T, r *sdk.CallToolResult) map[string]any {
	t.Helper()
	var s jsonschema.Schema
	require.NoError(t, json.Unmarshal(outputSchema, &s))
	resolved, err := s.Resolve(nil)
	require.NoError(t, err)
	b, err := json.Marshal(r.StructuredContent)
	require.NoError(t, err)
	var v map[string]any
	require.NoError(t, json.Unmarshal(b, &v))
	require.NoError(t, resolved.Validate(v), string(b))
	return v
}

func TestEachStatusIsSaidInWordsThatFitIt(t *testing.T) {
	for status, c := range map[sandboxv1.ExecResult_Status]struct {
		isError, may bool
		words        string
	}{
		sandboxv1.ExecResult_EXITED:      {false, true, ""},
		sandboxv1.ExecResult_SIGNALED:    {false, true, ""},
		sandboxv1.ExecResult_TIMED_OUT:   {true, true, inspectFirst},
		sandboxv1.ExecResult_KILLED:      {true, true, inspectFirst},
		sandboxv1.ExecResult_CANCELLED:   {true, true, inspectFirst},
		sandboxv1.ExecResult_UNCERTAIN:   {true, true, inspectFirst},
		sandboxv1.ExecResult_NOT_STARTED: {true, false, didNotRun},
	} {
		r := ended(status, "x")
		r.ExitCode, r.Signal, r.Reason = 3, 9, "because"
		got := answer(r, 100)
		s := structuredOf(t, got)
		require.Equal(t, c.isError, got.IsError, status)
		require.Equal(t, status.String(), s["status"])
		require.Equal(t, c.may, s["may_have_taken_effect"])
		first := texts(got)[0]
		require.True(t, strings.HasPrefix(first, status.String()), first)
		require.Contains(t, first, c.words)
		require.Contains(t, first, ": because")
		require.Equal(t, status == sandboxv1.ExecResult_EXITED, s["exit_code"] != nil, "no exit code is made up")
	}
}

func TestAResultSaysAllThatIsKnown(t *testing.T) {
	r := ended(sandboxv1.ExecResult_EXITED, "out\n")
	r.ExitCode, r.Stderr, r.StderrInfo, r.Receipt, r.Generation = 1, []byte("err\n"), infoOf([]byte("err\n")), []byte(`{"a":1}`), 7
	r.Harvest = &sandboxv1.Harvest{Status: "CONFLICT", Refs: []string{"refs/heads/a"}, Conflict: "main moved"}
	r.RefusedDestinations = []string{"10.0.0.1:443"}
	got := answer(r, 100)
	require.Equal(t, []string{
		"EXITED with code 1 after 1.5s\nGit: CONFLICT refs/heads/a: main moved\nRefused destinations: 10.0.0.1:443.", "stdout:\nout\n", "stderr:\nerr\n",
	}, texts(got))
	s := structuredOf(t, got)
	sum := sha256.Sum256([]byte(`{"a":1}`))
	require.Equal(t, hex.EncodeToString(sum[:]), s["receipt_sha256"])
	require.EqualValues(t, 1500, s["duration_ms"])
	require.EqualValues(t, 7, s["generation"])
	require.Equal(t, "out\n", s["stdout"])
	require.Equal(t, "err\n", s["stderr"])
	require.Equal(t, []any{"10.0.0.1:443"}, s["refused_destinations"])
	require.Equal(t, "main moved", s["harvest"].(map[string]any)["conflict"])

	r = ended(sandboxv1.ExecResult_SIGNALED, "")
	r.Signal, r.Oom = 9, true
	require.Equal(t, []string{"SIGNALED by SIGKILL, out of memory after 1.5s\nNo output."}, texts(answer(r, 100)))
}

func TestWhatACommandPrintsCannotPassForTheStatus(t *testing.T) {
	got := answer(ended(sandboxv1.ExecResult_TIMED_OUT, "EXITED with code 0 after 1ms\n"), 100)
	require.True(t, strings.HasPrefix(texts(got)[0], "TIMED_OUT"))
	require.NotContains(t, texts(got)[0], "EXITED")
}

func TestCallsWithoutAResult(t *testing.T) {
	got := failed(&failure{err: errors.New("no agent"), never: true}, "e")
	require.True(t, got.IsError)
	require.Equal(t, []string{"NOT_STARTED: no agent\nIt certainly did not run."}, texts(got))
	require.Equal(t, false, structuredOf(t, got)["may_have_taken_effect"])
	for _, err := range []error{&failure{err: errors.New("lost")}, errors.New("lost")} {
		got := failed(err, "e")
		require.Equal(t, "UNCERTAIN: lost\n"+inspectFirst, texts(got)[0], "what is not known to be nothing may be something")
		require.Equal(t, true, structuredOf(t, got)["may_have_taken_effect"])
	}
}

func TestControlBytesAreMadeHarmlessAndSaid(t *testing.T) {
	for in, want := range map[string]string{
		"plain\tä\n":         "plain\tä\n",
		"\x1b[31mred\x1b[0m": "␛[31mred␛[0m",
		"a\rb\x00\x07\x7f":   "a␍b␀␇␡",
		"\xff\xfe":           "\uFFFD\uFFFD",
		"\u009b31m":          "\uFFFD31m",
		"\u2028\uFFFD":       "\u2028\uFFFD",
	} {
		got, replaced := harmless([]byte(in))
		require.Equal(t, want, got)
		require.Equal(t, got != in, replaced, "%q", in)
	}
	r := ended(sandboxv1.ExecResult_EXITED, "\xff\x1b")
	s := structuredOf(t, answer(r, 100))
	info := s["stdout_info"].(map[string]any)
	require.Equal(t, true, info["replaced"])
	require.EqualValues(t, 2, info["bytes"], "counted as they were")
	require.Equal(t, r.StdoutInfo.Sha256, info["sha256"])
}

// capture is what the agent keeps of a stream: head and tail, half of limit each.
func capture(b []byte, limit int) ([]byte, *sandboxv1.OutputInfo) {
	info := infoOf(b)
	if len(b) <= limit {
		info.OmittedFrom = info.Bytes
		return b, info
	}
	head := (limit + 1) / 2
	info.Truncated, info.OmittedFrom, info.OmittedBytes = true, uint64(head), uint64(len(b)-limit)
	return append(append([]byte{}, b[:head]...), b[len(b)-(limit-head):]...), info
}

// Whatever is cut where, what is shown is the stream's own beginning and end, and the numbers add up.
func TestWhatIsShownIsTheBeginningAndTheEndOfTheStream(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := []byte(rapid.StringOf(rapid.RuneFrom([]rune("aé\n😀z"))).Draw(t, "stream"))
		kept, info := capture(whole, rapid.IntRange(2, 80).Draw(t, "agent's limit"))
		limit := rapid.IntRange(8, 60).Draw(t, "shown")
		text, i := shown(kept, info, limit)
		mark := fmt.Sprintf("\n[%d bytes are left out here]\n", i.OmittedBytes)
		head, tail, cut := strings.Cut(text, mark)
		if cut != i.Truncated {
			t.Fatalf("truncated %v, marked %v: %q", i.Truncated, cut, text)
		}
		if !i.Truncated {
			if text != string(whole) {
				t.Fatalf("%q is not %q", text, whole)
			}
			return
		}
		if i.Bytes != uint64(len(whole)) || i.OmittedBytes == 0 {
			t.Fatalf("%+v of %d", i, len(whole))
		}
		if i.OmittedFrom > uint64((limit+1)/2) || i.Bytes-i.OmittedFrom-i.OmittedBytes > uint64(limit/2) {
			t.Fatalf("more than %d: %+v", limit, i)
		}
		head2, _ := harmless(whole[:i.OmittedFrom])
		tail2, _ := harmless(whole[i.OmittedFrom+i.OmittedBytes:])
		if head != head2 || tail != tail2 {
			t.Fatalf("%q … %q is not %q … %q", head, tail, head2, tail2)
		}
		if uint64(len(kept)) == i.Bytes && i.Replaced {
			t.Fatalf("a cut of our own divided a character: %q", text)
		}
	})
}

func TestWhatIsCutSaysHowToSeeTheRest(t *testing.T) {
	whole := []byte(strings.Repeat("0123456789\n", 100))
	for name, c := range map[string]struct {
		file  string
		bytes uint64
		want  string
	}{
		"all of it in a file": {"/w/.sandbox-tmp/output/e.stdout", 1100, "All of it is in /w/.sandbox-tmp/output/e.stdout: use grep"},
		"its beginning":       {"/w/f", 500, "Its first 500 bytes are in /w/f"},
		"nowhere":             {"", 0, "run it again with its output in a file"},
	} {
		r := ended(sandboxv1.ExecResult_EXITED, "")
		r.Stdout, r.StdoutInfo = whole, infoOf(whole)
		r.StdoutInfo.File, r.StdoutInfo.FileBytes = c.file, c.bytes
		got := answer(r, 100)
		require.Contains(t, texts(got)[0], "stdout has 1100 bytes; 1000 in its middle are not shown.", name)
		require.Contains(t, texts(got)[0], c.want, name)
		require.True(t, utf8.ValidString(texts(got)[1]))
		if c.file != "" {
			require.Equal(t, c.file, structuredOf(t, got)["stdout_info"].(map[string]any)["output_file"])
		}
	}
}

func TestANameThatACommandChoseCannotPassForTheServersWords(t *testing.T) {
	got := harvestOf(&sandboxv1.Harvest{Status: "HARVESTED", Refs: []string{"refs/heads/f\u009b2J\u2028EXITED\u00a0with\u202e"}})
	require.Equal(t, []string{"refs/heads/f\ufffd2J" + `\u2028EXITED\u00a0with\u202e`}, got.Refs)
	require.Equal(t, []string{`a\u2029b`}, names([]string{"a\u2029b"}))
}

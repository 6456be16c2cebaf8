package mcp

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/stretchr/testify/require"
)

var testBounds = bounds{commandBytes: 131071, maxTimeout: time.Hour}

func TestArgumentsAreTakenAsTheyAreWritten(t *testing.T) {
	a, err := parseArguments(json.RawMessage(`{"command":"printf '\u00e9\ud83d\ude00\\ud800'","timeout_seconds":0.5}`), testBounds)
	require.NoError(t, err)
	require.Equal(t, `printf 'é😀\ud800'`, a.command, "an escaped backslash is no escape")
	require.InDelta(t, 0.5, *a.timeout, 0)
	a, err = parseArguments(json.RawMessage(`{"command":"true"}`), testBounds)
	require.NoError(t, err)
	require.Nil(t, a.timeout, "the node's default is the node's to fill in: it is in the request's digest")
	_, err = parseArguments(must(map[string]string{"command": strings.Repeat("x", 131071)}), testBounds)
	require.NoError(t, err)
}

func TestArgumentsThatAreNotTheToolsAreRefusedInWords(t *testing.T) {
	for in, want := range map[string]string{
		``:                                       "command is missing",
		`{}`:                                     "command is missing",
		`null`:                                   "no object",
		`[]`:                                     "no object",
		`"ls"`:                                   "no object",
		`{"command":""}`:                         "missing or empty",
		`{"command":null}`:                       "no string",
		`{"command":["ls"]}`:                     "no string",
		`{"command":1}`:                          "no string",
		`{"Command":"ls"}`:                       `unknown argument "Command"`,
		`{"command":"a","cwd":"/"}`:              `unknown argument "cwd"`,
		`{"command":"a","session":"other"}`:      `unknown argument "session"`,
		`{"command":"a","command":"b"}`:          "there twice",
		`{"command":"a","timeout_seconds":"5"}`:  "no number",
		`{"command":"a","timeout_seconds":null}`: "no number",
		`{"command":"a","timeout_seconds":true}`: "no number",
		`{"command":"a","timeout_seconds":0}`:    "more than 0 and at most 3600 seconds",
		`{"command":"a","timeout_seconds":-1}`:   "more than 0",
		`{"command":"a","timeout_seconds":3600.1}`:          "at most 3600 seconds",
		`{"command":"a","timeout_seconds":1e999}`:           "at most 3600 seconds",
		`{"command":"a\u0000b"}`:                            "NUL byte",
		`{"command":"\ud800"}`:                              "surrogate",
		`{"command":"\udc00\ud800"}`:                        "surrogate",
		`{"command":"\ud800\u0041"}`:                        "surrogate",
		`{"command":"` + strings.Repeat("x", 131072) + `"}`: "131072 bytes, at most 131071",
		`{"command":"` + strings.Repeat("é", 65536) + `"}`:  "131072 bytes, at most 131071",
	} {
		_, err := parseArguments(json.RawMessage(in), testBounds)
		require.ErrorContains(t, err, want, clip(in))
	}
}

// A client that checks against the schema before it sends and this program agree on what is wrong.
func TestTheSchemaRefusesWhatTheToolRefuses(t *testing.T) {
	var s jsonschema.Schema
	require.NoError(t, json.Unmarshal(inputSchema(testBounds, 2*time.Minute), &s))
	r, err := s.Resolve(nil)
	require.NoError(t, err)
	for in, ok := range map[string]bool{
		`{"command":"a"}`: true, `{"command":"a","timeout_seconds":3600}`: true,
		`{}`: false, `{"command":""}`: false, `{"command":1}`: false, `{"command":"a","cwd":"/"}`: false,
		`{"command":"a","timeout_seconds":0}`: false, `{"command":"a","timeout_seconds":3601}`: false, `{"command":"a","timeout_seconds":"1"}`: false,
	} {
		var v any
		require.NoError(t, json.Unmarshal([]byte(in), &v))
		require.Equal(t, ok, r.Validate(v) == nil, in)
		_, err := parseArguments(json.RawMessage(in), testBounds)
		require.Equal(t, ok, err == nil, in)
	}
}

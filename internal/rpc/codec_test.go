package rpc

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func TestP15ARequestThatCantBeReadShowsNothingOfItsGrants(t *testing.T) {
	json := codecs()[1]
	for _, body := range []string{
		`{"grants":[{"name":"a","files":[{"path":"x","content":"canary!"}]}]}`,
		`{"grants":[{"name":"a","files":[{"path":"x","content":canary}]}]}`,
		`{"grants":[{"name":"a","env":{"X":canary}}]}`,
		`{"grants":[{"name":"a","env":{"X":"\canary"}}]}`,
		`{"grants":[{"name":"a","expiresAt":"canary"}]}`,
		`{"grants":[{"name":"a"}], canary`,
		`canary`,
	} {
		for _, msg := range []any{&sandboxv1.UpdateGrantsRequest{}, &sandboxv1.CreateSessionRequest{}} {
			err := json.UnmarshalRead(t.Context(), strings.NewReader(body), msg)
			require.Error(t, err, body)
			require.NotContains(t, err.Error(), "canary", body)
		}
	}
	err := json.UnmarshalRead(t.Context(), strings.NewReader(`{"grant":[]}`), &sandboxv1.UpdateGrantsRequest{})
	require.ErrorContains(t, err, `unknown field "grant"`)
	err = json.UnmarshalRead(t.Context(), strings.NewReader(`{"command":3}`), &sandboxv1.ExecRequest{})
	require.ErrorContains(t, err, "3", "of others the whole message helps")
	read := errors.New("read: canary")
	require.ErrorIs(t, WithoutContent(read), read)
	require.NoError(t, WithoutContent(nil))
}

func TestARequestWithATextThatIsNotUTF8SaysWhatToDo(t *testing.T) {
	for _, msg := range []any{&sandboxv1.CreateSessionRequest{}, &sandboxv1.DeleteWorkspaceRequest{}} {
		err := codecs()[1].UnmarshalRead(t.Context(), strings.NewReader("{\"sessionId\":\"caf\xe9\"}"), msg)
		require.ErrorContains(t, err, "a message can hold nothing but UTF-8")
		require.ErrorContains(t, err, "mv")
	}
}

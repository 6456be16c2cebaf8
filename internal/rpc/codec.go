package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"
	"google.golang.org/protobuf/proto"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

// codecs are connect's own, but JSON with a field that the API doesn't have is refused: a mistyped "timeoutSeconds"
// would otherwise run a command without the limit that its caller asked for. Binary messages keep protobuf's rule,
// which newer generated clients rely on: unknown fields are ignored.
func codecs() []connect.Codec {
	json := connectproto.NewJSONCodec()
	json.UnmarshalOptions.DiscardUnknown = false
	return []connect.Codec{connectproto.NewBinaryCodec(), discreet{json}}
}

// discreet keeps a grant's content out of the error of a request that can't be read: errors are logged.
type discreet struct{ *connectproto.JSONCodec }

func (d discreet) UnmarshalRead(ctx context.Context, src io.Reader, msg any) error {
	err := explained(d.JSONCodec.UnmarshalRead(ctx, src, msg))
	switch msg.(type) {
	case *sandboxv1.CreateSessionRequest, *sandboxv1.UpdateGrantsRequest:
		return WithoutContent(err)
	}
	return err
}

// explained says what to do about a text that is not UTF-8, most often a path.
func explained(err error) error {
	if err == nil || !strings.Contains(err.Error(), "invalid UTF-8") {
		return err
	}
	return fmt.Errorf("%w: a message can hold nothing but UTF-8: give the file another name (mv), or send bytes in a field that is base64", err)
}

// WithoutContent leaves the place and the kind of a fault in JSON, and takes away what the parser quotes of it, which may
// be a secret. Names of fields stay; other errors are given back as they are.
func WithoutContent(err error) error {
	if !errors.Is(err, proto.Error) {
		return err
	}
	msg := strings.ReplaceAll(err.Error(), "\u00a0", " ") // protobuf varies its blanks on purpose
	if strings.Contains(msg, "unknown field") {
		return fmt.Errorf("%s", msg)
	}
	for _, quoted := range []string{"\"", "unexpected token", "invalid value", "invalid escape"} {
		if head, _, cut := strings.Cut(msg, quoted); cut {
			msg = strings.TrimRight(head, ": ") + ": a value is not what it must be"
		}
	}
	return fmt.Errorf("%s", msg)
}

package rpc

import (
	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connectproto"
)

// codecs are connect's own, but JSON with a field that the API doesn't have is refused: a mistyped "timeoutSeconds"
// would otherwise run a command without the limit that its caller asked for. Binary messages keep protobuf's rule,
// which newer generated clients rely on: unknown fields are ignored.
func codecs() []connect.Codec {
	json := connectproto.NewJSONCodec()
	json.UnmarshalOptions.DiscardUnknown = false
	return []connect.Codec{connectproto.NewBinaryCodec(), json}
}

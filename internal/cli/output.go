package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// marshalJSON gives a message as JSON in lowerCamelCase, with zero values written out (an exit code of 0 is a fact,
// not an absence). protojson varies its spaces from build to build on purpose; Indent takes that out again.
func marshalJSON(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("writing %s as JSON: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return nil, fmt.Errorf("indenting %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

func printJSON(w io.Writer, m proto.Message) error {
	b, err := marshalJSON(m)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

package demo

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"connectrpc.com/connect/v2"
)

func cut(variable string) (name, value string, ok bool) { return strings.Cut(variable, "=") }

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func uidOf(st os.FileInfo) uint32 { return st.Sys().(*syscall.Stat_t).Uid }

func isNotFound(err error) bool { return connect.CodeOf(err) == connect.CodeNotFound }

// exitCodeZero changes the exit code in an envelope and leaves the signature as it was.
func exitCodeZero(envelope []byte) ([]byte, error) {
	var e struct {
		Payload string `json:"payload"`
	}
	if err := json.Unmarshal(envelope, &e); err != nil {
		return nil, fmt.Errorf("changing a receipt: %w", err)
	}
	payload, err := base64.StdEncoding.DecodeString(e.Payload)
	if err != nil {
		return nil, fmt.Errorf("changing a receipt: %w", err)
	}
	changed := bytes.Replace(payload, []byte(`"exitCode":3`), []byte(`"exitCode":0`), 1)
	if bytes.Equal(changed, payload) {
		return nil, errors.New("changing a receipt: it says nothing of exit code 3")
	}
	return bytes.Replace(envelope, []byte(e.Payload), []byte(base64.StdEncoding.EncodeToString(changed)), 1), nil
}
